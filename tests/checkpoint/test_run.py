"""Folders of checkpoints: what is found in them, what is cleaned up, and what is refused without being believed."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import paraflow as pf
from paraflow.callbacks import Checkpoint
from paraflow.checkpoint import find, load_model, saved_in
from paraflow.checkpoint.contents import contents
from paraflow.checkpoint.folders import tidy
from paraflow.checkpoint.listing import entries
from paraflow.checkpoint.reading import read
from tests.callbacks.runs import linear, samples


def fit(folder: Path, steps: int = 4, resume: Any = None, **options: Any) -> pf.Trainer:
    """Two steps an epoch."""
    trainer = pf.Trainer(max_steps=steps, progress=False, callbacks=[Checkpoint(folder, 1, **options)])
    trainer.fit(linear(), samples(8), batch_size=4, resume=resume)
    return trainer


def names(folder: Path) -> list[str]:
    return [path.name for path in saved_in(folder)]


def test_what_a_killed_process_left_half_done_is_never_taken_and_is_cleaned_up(tmp_path: Path) -> None:
    fit(tmp_path, keep=2)
    whole = names(tmp_path)
    assert whole == ["step-00000003", "step-00000004"]
    for left in (".step-00000005.writing", ".step-00000002.removing"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "state.json").write_text("{}")
    assert names(tmp_path) == whole
    assert find(tmp_path).name == "step-00000004"
    (tmp_path / ".step-notes.txt").write_text("mine")
    (tmp_path / "notes").mkdir()
    fit(tmp_path, 5, resume="auto", keep=2)
    assert sorted(os.listdir(tmp_path)) == [".step-notes.txt", "notes", "step-00000004", "step-00000005"]


def test_tidying_leaves_what_can_be_recovered(tmp_path: Path) -> None:
    fit(tmp_path, keep=2)
    aside = (tmp_path / "step-00000004").rename(tmp_path / ".step-00000004.old")  # cut short between two renames
    assert find(tmp_path) == find(tmp_path / "step-00000004") == aside
    assert [entry.path for entry in entries(tmp_path)] == [tmp_path / "step-00000003", aside]
    assert contents(tmp_path / "step-00000004").step == 4
    assert aside.is_dir()  # who reads renames nothing: a run may be between its two renames
    tidy(tmp_path)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    assert fit(tmp_path, 5, resume="auto", keep=2).step == 5
    assert sorted(os.listdir(tmp_path)) == ["step-00000004", "step-00000005"]


def test_an_old_one_beside_its_replacement_is_not_put_back(tmp_path: Path) -> None:
    fit(tmp_path)
    new = read(tmp_path / "step-00000004")
    (tmp_path / ".step-00000004.old").mkdir()
    (tmp_path / ".step-00000004.old" / "state.json").write_text("{}")
    assert names(tmp_path) == ["step-00000004"]
    assert torch.equal(read(find(tmp_path))["model"]["weight"], new["model"]["weight"])


def test_the_newest_is_the_one_that_was_written_last_whatever_its_name(tmp_path: Path) -> None:
    fit(tmp_path, 4)
    fit(tmp_path, 2)
    assert find(tmp_path).name == "step-00000002"


class Executed:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


MODULE = "evil_module_of_a_checkpoint"


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def change(*keys: str, to: Any = None, drop: bool = False) -> Callable[[dict[str, Any]], None]:
    """Returns what sets or drops a part of the state, found by its keys."""

    def act(content: dict[str, Any]) -> None:
        part = content
        for key in keys[:-1]:
            part = part[key]
        if drop:
            del part[keys[-1]]
        else:
            part[keys[-1]] = to

    return act


NUMBERED = {"__numbered__": 3}
HOSTILE: dict[str, Callable[[dict[str, Any]], None]] = {
    "no state": change("state", drop=True),
    "a state that is a list": change("state", to=[1, 2]),
    "a state that is a number": change("state", to=3),
    "another version": change("version", to=999),
    "no version": change("version", drop=True),
    "a tensor that is not there": change("state", "model", "weight", to={"__tensor__": "nowhere"}),
    "a tensor by a list": change("state", "model", "weight", to={"__tensor__": ["model/weight"]}),
    "a tensor by a dict": change("state", "model", "weight", to={"__tensor__": {"a": 1}}),
    "numbers that are none": change("state", "model", to=NUMBERED),
    "numbered by lists": change("state", "model", to={"__numbered__": [[[1], 2]]}),
    "pairs of three": change("state", "model", to={"__numbered__": [[1, 2, 3]]}),
    "a tuple of nothing": change("state", "model", to={"__tuple__": 5}),
    "a model that is a list": change("state", "model", to=[1]),
    "a model of numbers": change("state", "model", "weight", to=5),
    "a model of texts": change("state", "model", "weight", to="torch.load"),
    "no model": change("state", "model", drop=True),
    "no optimizer groups": change("state", "optimizer", "param_groups", drop=True),
    "an optimizer that is a text": change("state", "optimizer", to="os.system"),
    "an unknown parameter": change("state", "optimizer", "state", to={"nowhere": {}}),
    "groups of numbers": change("state", "optimizer", "param_groups", to=[3]),
    "no counters": change("state", "counters", drop=True),
    "a step that is a text": change("state", "counters", "step", to="four"),
    "a step below zero": change("state", "counters", "step", to=-3),
    "an epoch that is a list": change("state", "counters", "epoch", to=[1]),
    "no run": change("state", "run", drop=True),
    "a position that is a text": change("state", "run", "feed", "position", to="here"),
    "parts that are none": change("state", "run", "parts", to=None),
    "no history": change("state", "history", drop=True),
    "a history of numbers": change("state", "history", to={"history": {"loss": 3}, "epoch": [0]}),
    "callbacks in a list": change("state", "callbacks", to=[1, 2]),
    "a callback of nothing": change("state", "callbacks", "Checkpoint-1", to=None),
    "no random state": change("state", "random", drop=True),
    "random state of numbers": change("state", "random", to=[5]),
    "random state of texts": change("state", "random", to=["random.seed"]),
    "random state without a generator": change("state", "random", to=[{"torch": 3}]),
    "a deep nest": change("state", "extra", to=nested(700)),
    "a nest too deep for the reader": change("state", "extra", to="DEEP"),
    "names of functions": change(
        "state", "callbacks", to={"Checkpoint-1": {"__reduce__": [f"{MODULE}.run", []], "py/object": MODULE}}
    ),
}


def rewrite(folder: Path, act: Callable[[dict[str, Any]], None]) -> None:
    """Changes a checkpoint's state and makes its checksums right again."""
    content = json.loads((folder / "state.json").read_text())
    act(content)
    deep = json.dumps(content).replace('"DEEP"', "[" * 100_000 + "]" * 100_000)
    (folder / "state.json").write_text(deep)
    seal(folder)


def seal(folder: Path) -> None:
    files = ("state.json", "tensors-00000.safetensors")
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files}
    (folder / "checksums.json").write_text(json.dumps(sums))


class Fresh(pf.Callback):
    """Fails a test in which training begins."""

    def on_train_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        raise AssertionError("training began")


def refused(folder: Path, resume: Any) -> str:
    trainer = pf.Trainer(max_steps=9, progress=False, callbacks=[Checkpoint(folder, 1), Fresh()])
    with pytest.raises(pf.CheckpointError) as caught:
        trainer.fit(linear(), samples(8), batch_size=4, resume=resume)
    return str(caught.value)


@pytest.mark.parametrize("case", HOSTILE)
def test_a_state_of_another_form_is_refused_and_nothing_in_it_is_run(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"{MODULE}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\ndef run(): pass\n")
    fit(tmp_path / "runs", 3)
    rewrite(tmp_path / "runs" / "step-00000003", HOSTILE[case])
    for resume in ("auto", tmp_path / "runs"):
        assert "step-00000003" in refused(tmp_path / "runs", resume)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["tensors-00000.safetensors", "state.json"])
def test_a_pickle_is_never_opened(tmp_path: Path, name: str) -> None:
    fit(tmp_path, 3)
    folder = tmp_path / "step-00000003"
    (folder / name).write_bytes(pickle.dumps({"weight": Executed(tmp_path / "executed")}))
    seal(folder)
    assert "step-00000003" in refused(tmp_path, "auto")
    torch.save({"weight": torch.ones(1, 2)}, folder / name)
    seal(folder)
    assert "step-00000003" in refused(tmp_path, tmp_path)
    with pytest.raises(pf.CheckpointError):
        load_model(linear(), tmp_path)
    assert not (tmp_path / "executed").exists()


def test_a_state_of_another_form_is_refused_by_load_model(tmp_path: Path) -> None:
    fit(tmp_path, 3, monitor="loss")
    good = (tmp_path / "step-00000003" / "state.json").read_text()
    for case in (
        "no model",
        "a model of numbers",
        "a model that is a list",
        "a tensor by a list",
        "callbacks in a list",
    ):
        (tmp_path / "step-00000003" / "state.json").write_text(good)
        rewrite(tmp_path / "step-00000003", HOSTILE[case])
        with pytest.raises(pf.CheckpointError):
            load_model(linear(), tmp_path, best=case == "callbacks in a list")


def on_a_rank(folder: str) -> str:
    return refused(Path(folder), "auto")


def test_what_one_rank_cannot_take_up_is_refused_by_all(ranks: Any, tmp_path: Path) -> None:
    """The random state of rank 1 is broken, which rank 0 does not read."""
    ranks(2, fit_on_a_rank, str(tmp_path))

    def act(content: dict[str, Any]) -> None:
        content["state"]["random"][1]["torch"] = "not a tensor"

    rewrite(tmp_path / "step-00000003", act)
    first, second = ranks(2, on_a_rank, str(tmp_path), timeout=30)
    assert first == second
    assert "step-00000003" in first


def fit_on_a_rank(folder: str) -> None:
    fit(Path(folder), 3)


def test_it_says_what_the_model_is(tmp_path: Path) -> None:
    class Config:
        model_type = "linear"

        def to_dict(self) -> dict[str, Any]:
            return {"model_type": "linear", "id2label": {0: "no", 1: "yes"}, "sizes": (1, 2)}

    model = linear()
    model.config = Config()  # type: ignore[assignment]
    pf.Trainer(max_steps=1, progress=False, callbacks=[Checkpoint(tmp_path, 1)]).fit(model, samples(8), batch_size=4)
    config = {"model_type": "linear", "id2label": {"0": "no", "1": "yes"}, "sizes": [1, 2]}
    assert read(find(tmp_path))["about"] == {"model_class": type(model).__name__, "config": config}
