"""A dry run: two steps of everything, and all as it was before."""

from __future__ import annotations

import copy
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import paraflow as pf
from paraflow.checkpoint.image import take_apart
from paraflow.checkpoint.random import random_state
from tests.callbacks.contract import Kept, net, same

X = torch.randn(24, 5, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (24,), generator=torch.Generator().manual_seed(2))


def plainly(state: Any) -> tuple[str, dict[str, torch.Tensor]]:
    image = take_apart(state)
    return json.dumps(image.plain), {name: tensor.clone() for name, tensor in image.tensors.items()}


class Counting(pf.Callback):
    """Has state, and notes what it hears of."""

    def __init__(self) -> None:
        self.count = 7
        self.seen: list[str] = []

    def on_train_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.seen.append("begin")

    def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.count += 1
        self.seen.append("step")
        random.random(), np.random.rand(), torch.rand(1)

    def on_validation_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.seen.append("validation")

    def on_epoch_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.seen.append("epoch")

    def on_train_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.seen.append("end")

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Watched(pf.Trainer):
    """Keeps what there is when a dry run begins."""

    def _begin_run(self, *args: Any) -> None:
        super()._begin_run(*args)
        self.before = self.everything()

    def everything(self) -> dict[str, Any]:
        module = self.engine.module
        return {
            "state": plainly(self.state_dict()),
            "random": plainly({"random": random_state(self.mesh)}),
            "modes": [part.training for part in module.modules()],
            "gradients": [parameter.grad for parameter in module.parameters()],
            "optimizer": copy.deepcopy(self.engine.optimizer.state_dict()),
            "limits": self.limits,
            "counters": (self.step, self.epoch, self.current_epoch, self.epoch_complete, self.engine.lr),
            "history": (dict(self.history.history), list(self.history.epoch)),
        }


def difference(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    differing = [name for name in before if name not in ("state", "random") and before[name] != after[name]]
    for name in ("state", "random"):
        (mine, my_tensors), (theirs, their_tensors) = before[name], after[name]
        tensors = {key: tensor.nan_to_num(nan=-1.0) for key, tensor in my_tensors.items()}
        others = {key: tensor.nan_to_num(nan=-1.0) for key, tensor in their_tensors.items()}
        differing += [] if mine == theirs and same(tensors, others) else [name]
    return differing


def dry(folder: str, **plan: Any) -> tuple[list[str], list[str], list[Any], list[str]]:
    counting, kept = Counting(), Kept()
    saving = pf.callbacks.Checkpoint(Path(folder) / "deep" / "runs", 1, monitor="val_loss")
    trainer = Watched(
        max_epochs=3,
        progress=False,
        dry_run=True,
        callbacks=[counting, pf.callbacks.EMA(0.9), saving],
        loggers=[kept],
        **plan,
    )
    history = trainer.fit(net(), (X, Y), (X, Y), batch_size=6)
    assert history["loss"][0] > 0
    assert history["val_loss"][0] > 0
    return difference(trainer.before, trainer.everything()), counting.seen, kept.written, sorted(os.listdir(folder))


@pytest.mark.parametrize(
    ("size", "plan"), [(1, {}), (2, {}), (1, {"precision": "fp16", "accumulate": 2, "clip_norm": 1.0})]
)
def test_all_is_as_it_was(ranks: Any, tmp_path: Path, size: int, plan: dict[str, Any]) -> None:
    for differing, seen, written, files in ranks(size, dry, str(tmp_path), **plan):
        assert differing == []
        assert seen == ["begin", "step", "step", "validation", "epoch", "end"]
        assert written == []
        assert files == []


def test_the_folder_of_checkpoints_is_as_it_was(tmp_path: Path) -> None:
    def listing() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}

    saving = pf.callbacks.Checkpoint(tmp_path, 1)
    pf.Trainer(max_steps=3, progress=False, callbacks=[saving]).fit(net(), (X, Y), batch_size=6)
    before = listing()
    trainer = Watched(max_steps=9, progress=False, dry_run=True, callbacks=[pf.callbacks.Checkpoint(tmp_path, 1)])
    trainer.fit(net(), (X, Y), batch_size=6, resume="auto")
    assert trainer.step == 3, "the dry run was of the run that is resumed"
    assert listing() == before
    assert len(before) == 3


def test_the_run_after_a_dry_run_is_the_run(tmp_path: Path) -> None:
    plain, tried = net(), net()
    pf.Trainer(max_epochs=2, progress=False).fit(plain, (X, Y), (X, Y), batch_size=6)
    pf.Trainer(max_epochs=2, progress=False, dry_run=True).fit(tried, (X, Y), (X, Y), batch_size=6)
    assert same(tried.state_dict(), net().state_dict())
    pf.Trainer(max_epochs=2, progress=False).fit(tried, (X, Y), (X, Y), batch_size=6)
    assert same(tried.state_dict(), plain.state_dict())


class Forgetful(Counting):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"] + 1


class ForgetfulOfTensors(pf.Callback):
    def __init__(self) -> None:
        self.sum = torch.zeros(3)

    def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.sum += 1

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sum = torch.zeros(3)


def found(lossy: pf.Callback) -> str:
    with pytest.raises(pf.CheckpointError) as caught:
        pf.Trainer(progress=False, dry_run=True, callbacks=[lossy]).fit(net(), (X, Y), batch_size=6)
    return str(caught.value)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("lossy", "what"),
    [(Forgetful(), "what is no tensor"), (ForgetfulOfTensors(), "callbacks/ForgetfulOfTensors-1/sum")],
)
def test_a_callback_that_loses_something_is_found(ranks: Any, size: int, lossy: pf.Callback, what: str) -> None:
    sentence = f"What was restored is not what was saved: {what} differs."
    assert all(text.startswith(sentence) for text in ranks(size, found, lossy))


@pytest.mark.parametrize(
    "callback",
    [
        pf.callbacks.TimeLimit("1h", over_resumes=True),
        pf.callbacks.EMA(0.9, swap_at_end=True),
        pf.callbacks.StochasticWeightAveraging(0, 1),
        pf.callbacks.EarlyStopping("loss", restore_best=True),
        pf.callbacks.LearningRateFinder(steps=10, apply=True),
        pf.callbacks.Throughput(1),
    ],
    ids=lambda callback: type(callback).__name__,
)
def test_callbacks_that_end_with_the_run_take_part(callback: pf.Callback) -> None:
    trainer = Watched(max_epochs=2, progress=False, dry_run=True, callbacks=[callback])
    model = net()
    trainer.fit(model, (X, Y), batch_size=6)
    assert same(model.state_dict(), net().state_dict())


def unwritable(folder: str) -> str:
    (Path(folder) / "file").touch()
    saving = pf.callbacks.Checkpoint(Path(folder) / "file" / "runs")
    with pytest.raises(pf.CheckpointError) as caught:
        pf.Trainer(progress=False, dry_run=True, callbacks=[saving]).fit(net(), (X, Y), batch_size=6)
    return str(caught.value)


@pytest.mark.parametrize("size", [1, 2])
def test_a_place_that_cannot_be_written_is_found(ranks: Any, tmp_path: Path, size: int) -> None:
    for text in ranks(size, unwritable, str(tmp_path)):
        assert text.startswith("A dry run cannot save where the run would")
        assert str(tmp_path / "file" / "runs") in text


def test_it_says_what_it_did(capsys: Any) -> None:
    model: nn.Module = net()
    pf.Trainer(dry_run=True).fit(model, (X, Y), (X, Y), batch_size=6)
    said = capsys.readouterr().out
    assert "dry run: 2 steps, validation of at most 2 batches, " in said
    assert "The run is as it was before." in said
