"""``resume="auto"``: the newest intact checkpoint that the run's own callbacks have written, and what is said of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import paraflow as pf
from paraflow.callbacks import Checkpoint
from tests.callbacks.runs import linear, samples


def fit(
    folder: Path, steps: int = 4, resume: Any = "auto", callbacks: list[Any] | None = None, **options: Any
) -> pf.Trainer:
    """Two steps an epoch, a checkpoint a step."""
    listed = [Checkpoint(folder, 1, keep=9)] if callbacks is None else callbacks
    trainer = pf.Trainer(max_steps=steps, callbacks=listed, **options)
    trainer.fit(linear(), samples(8), batch_size=4, resume=resume)
    return trainer


def said(capsys: Any) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if "resum" in line or "left out" in line]


def test_a_fresh_start_says_so(tmp_path: Path, capsys: Any) -> None:
    assert fit(tmp_path / "runs").step == 4
    assert said(capsys) == [f"nothing to resume from in {tmp_path / 'runs'}: starting at step 0"]


def test_the_newest_is_taken_and_the_run_is_the_one_that_was_not_stopped(tmp_path: Path, capsys: Any) -> None:
    whole = fit(tmp_path / "whole", 7)
    fit(tmp_path / "parts", 3)
    capsys.readouterr()
    rest = fit(tmp_path / "parts", 7)
    assert said(capsys) == [f"resumed from {tmp_path / 'parts' / 'step-00000003'} at step 3"]
    assert torch.equal(rest.engine.module.weight, whole.engine.module.weight)


def flip(folder: Path) -> None:
    content = bytearray((folder / "tensors-00000.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "tensors-00000.safetensors").write_bytes(bytes(content))


def truncate(folder: Path) -> None:
    path = folder / "state.json"
    path.write_bytes(path.read_bytes()[:-5])


def without_tensors(folder: Path) -> None:
    (folder / "tensors-00000.safetensors").unlink()


def without_checksums(folder: Path) -> None:
    (folder / "checksums.json").unlink()


def garbled_checksums(folder: Path) -> None:
    (folder / "checksums.json").write_text("[")


DAMAGE = {
    flip: "is damaged: tensors-00000.safetensors changed since it was written",
    truncate: "is damaged: state.json changed since it was written",
    without_tensors: "is no whole checkpoint: it has no tensors-00000.safetensors",
    without_checksums: "is no whole checkpoint: it has no checksums.json",
    garbled_checksums: "cannot be read",
}
damages = pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)


@damages
def test_one_that_is_damaged_is_left_out_and_said_and_the_next_is_taken(
    tmp_path: Path, capsys: Any, damage: Any
) -> None:
    whole = fit(tmp_path / "whole", 6)
    fit(tmp_path / "runs", 4)
    damage(tmp_path / "runs" / "step-00000004")
    capsys.readouterr()
    rest = fit(tmp_path / "runs", 6)
    left_out, resumed = said(capsys)
    assert left_out.startswith("left out: ")
    assert str(tmp_path / "runs" / "step-00000004") in left_out
    assert DAMAGE[damage] in left_out
    assert resumed == f"resumed from {tmp_path / 'runs' / 'step-00000003'} at step 3"
    assert torch.equal(rest.engine.module.weight, whole.engine.module.weight)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir())[-1] == "step-00000006"


def test_a_folder_without_its_state_is_no_checkpoint(tmp_path: Path, capsys: Any) -> None:
    fit(tmp_path, 4)
    (tmp_path / "step-00000004" / "state.json").unlink()
    capsys.readouterr()
    assert fit(tmp_path, 6).step == 6
    assert said(capsys) == [f"resumed from {tmp_path / 'step-00000003'} at step 3"]


class Fresh(pf.Callback):
    """Fails a test in which training begins."""

    def on_train_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        raise AssertionError("training began")


def test_where_all_are_damaged_each_is_named_and_nothing_begins(tmp_path: Path) -> None:
    fit(tmp_path, 3)
    for number, damage in enumerate((flip, truncate, without_tensors), 1):
        damage(tmp_path / f"step-0000000{number}")
    with pytest.raises(pf.CheckpointError) as caught:
        fit(tmp_path, 6, callbacks=[Checkpoint(tmp_path), Fresh()])
    assert str(caught.value).startswith("None of the 3 checkpoints can be resumed from. ")
    for number in (1, 2, 3):
        assert str(tmp_path / f"step-0000000{number}") in str(caught.value)


def other() -> torch.nn.Module:
    return pf.configure(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)), loss="mse")


def wider() -> torch.nn.Module:
    return pf.configure(torch.nn.Linear(2, 5), loss="cross_entropy")


@pytest.mark.parametrize("resume", ["auto", "path"])
def test_another_model_is_refused_by_names_and_shapes(tmp_path: Path, resume: str) -> None:
    fit(tmp_path, 2)
    before = sorted(tmp_path.rglob("*"))
    path = "auto" if resume == "auto" else tmp_path
    trainer = pf.Trainer(progress=False, callbacks=[Checkpoint(tmp_path), Fresh()])
    with pytest.raises(pf.CheckpointError) as caught:
        trainer.fit(other(), samples(8), resume=path)
    sentence = str(caught.value)
    assert f"The checkpoint {str(tmp_path / 'step-00000002')!r} is of another model: it lacks 0.bias" in sentence
    assert "it has bias" in sentence
    with pytest.raises(pf.CheckpointError) as caught:
        trainer.fit(wider(), samples(8), resume=path)
    assert str(caught.value).endswith("of another shape: weight (1, 2) for (5, 2), bias (1,) for (5,).")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("newest", ["a", "b"])
def test_of_several_callbacks_the_newest_of_all_is_taken(tmp_path: Path, capsys: Any, newest: str) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    fit(a, 3) if newest == "b" else fit(b, 3)
    fit(b, 2) if newest == "b" else fit(a, 2)
    capsys.readouterr()
    fit(tmp_path, 4, callbacks=[Checkpoint(a), Checkpoint(b)])
    assert said(capsys) == [f"resumed from {tmp_path / newest / 'step-00000002'} at step 2"]


def test_damage_in_one_folder_leads_to_the_other(tmp_path: Path, capsys: Any) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    fit(a, 1)
    fit(b, 2)
    flip(b / "step-00000002")
    flip(b / "step-00000001")
    capsys.readouterr()
    fit(tmp_path, 4, callbacks=[Checkpoint(b), Checkpoint(a)])
    assert [line.split(" is damaged")[0] for line in said(capsys)] == [
        f"left out: The checkpoint {str(b / 'step-00000002')!r}",
        f"left out: The checkpoint {str(b / 'step-00000001')!r}",
        f"resumed from {a / 'step-00000001'} at step 1",
    ]


def test_a_run_that_saves_nothing_has_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(pf.ParaflowError, match=r"its? has none\. Write Trainer\(callbacks=\[pf\.callbacks\.Checkpoint"):
        fit(tmp_path, callbacks=[Fresh()])


def test_a_damaged_one_given_by_its_path_is_refused_and_auto_is_named(tmp_path: Path) -> None:
    fit(tmp_path, 3)
    flip(tmp_path / "step-00000003")
    for path in (tmp_path, tmp_path / "step-00000003"):
        with pytest.raises(pf.CheckpointError, match=r"step-00000003.* is damaged.*resume='auto' takes the newest"):
            fit(tmp_path, 5, resume=path)
    assert fit(tmp_path, 5, resume=tmp_path / "step-00000002").step == 5


def test_a_finished_run_is_resumed_and_has_nothing_to_do(tmp_path: Path, capsys: Any) -> None:
    first = fit(tmp_path, 4)
    capsys.readouterr()
    again = fit(tmp_path, 4)
    assert said(capsys) == [f"resumed from {tmp_path / 'step-00000004'} at step 4; the run is complete"]
    assert torch.equal(again.engine.module.weight, first.engine.module.weight)


def on_a_rank(folder: str, case: str) -> tuple[str, int]:
    home = Path(folder)
    trainer = pf.Trainer(max_steps=5, progress=False, callbacks=[] if case == "none" else [Checkpoint(home, 1, keep=9)])
    try:
        trainer.fit(other() if case == "other" else linear(), samples(8), batch_size=4, resume="auto")
    except pf.ParaflowError as error:
        return str(error), trainer.step
    return "", trainer.step


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("fresh", ""),
        ("newest damaged", ""),
        ("damaged", "None of the 3 checkpoints can be resumed from."),
        ("other", "is of another model"),
        ("none", "takes up what the run's own Checkpoint callback has saved"),
    ],
)
def test_two_ranks_decide_and_refuse_alike(ranks: Any, tmp_path: Path, case: str, sentence: str) -> None:
    if case != "fresh":
        fit(tmp_path, 3, progress=False)
    if case == "newest damaged":
        flip(tmp_path / "step-00000003")
    if case == "damaged":
        for part in tmp_path.iterdir():
            truncate(part)
    (first, step), second = ranks(2, on_a_rank, str(tmp_path), case, timeout=30)
    assert second == (first, step)
    assert step == (0 if sentence else 5)
    assert sentence in first
    assert bool(first) == bool(sentence)


def unreadable(folder: str) -> str:
    """Rank 1 has another disk, on which the checkpoint is not."""
    home = Path(folder)
    if pf.rank() == 1:
        shutil.copytree(home / "0", home / "1")
        (home / "1" / "step-00000003" / "tensors-00000.safetensors").write_bytes(b"")
    import os

    os.chdir(home / str(pf.rank()))
    trainer = pf.Trainer(max_steps=5, progress=False, callbacks=[Checkpoint(".", 1), Fresh()])
    with pytest.raises(pf.CheckpointError) as caught:
        trainer.fit(linear(), samples(8), batch_size=4, resume="auto")
    os.chdir("/")
    return str(caught.value)


def test_a_rank_that_cannot_read_what_rank_0_can_is_named(ranks: Any, tmp_path: Path) -> None:
    fit(tmp_path / "0", 3, progress=False)
    for sentence in ranks(2, unreadable, str(tmp_path), timeout=30):
        assert sentence.startswith("Rank 1 cannot read what rank 0 can; put checkpoints where all can.")
