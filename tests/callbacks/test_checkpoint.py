from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import paraflow as pf
from paraflow.callbacks import Checkpoint
from paraflow.checkpoint import find, load_model, saved_in
from tests.callbacks.runs import Scripted, linear, samples

VAL = samples(4)


def steps_in(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in saved_in(folder)]


def fit(model: torch.nn.Module, checkpoint: Checkpoint, epochs: int = 4, val: Any = VAL, **options: Any) -> pf.Trainer:
    """Two steps an epoch."""
    resume = options.pop("resume", None)
    trainer = pf.Trainer(max_epochs=epochs, callbacks=[checkpoint], progress=False, **options)
    trainer.fit(model, samples(8), val, batch_size=4, resume=resume)
    return trainer


@pytest.mark.parametrize(
    ("every", "epochs", "expected"),
    [
        ("1ep", 3, [2, 4, 6]),
        ("2ep", 5, [4, 8, 10]),
        ("3st", 2, [3, 4]),
        (3, 3, [3, 6]),
        ("500st", 2, [4]),
        ("1h", 2, [4]),
    ],
)
def test_it_saves_at_its_interval_and_at_the_end(tmp_path: Path, every: Any, epochs: int, expected: list[int]) -> None:
    fit(linear(), Checkpoint(tmp_path, every, keep=9), epochs, val=None)
    assert steps_in(tmp_path) == expected


def test_it_saves_where_max_steps_ends_the_run(tmp_path: Path) -> None:
    fit(linear(), Checkpoint(tmp_path, keep=9), 4, val=None, max_steps=3)
    assert steps_in(tmp_path) == [2, 3]


@pytest.mark.parametrize(("keep", "expected"), [(1, [8]), (2, [6, 8]), (3, [4, 6, 8])])
def test_the_last_stay(tmp_path: Path, keep: int, expected: list[int]) -> None:
    fit(linear(), Checkpoint(tmp_path, keep=keep), val=None)
    assert steps_in(tmp_path) == expected


@pytest.mark.parametrize(
    ("values", "mode", "keep", "best", "expected"),
    [
        ([5.0, 1.0, 3.0, 4.0], None, 1, 4, [4, 8]),
        ([5.0, 1.0, 3.0, 4.0], None, 2, 4, [4, 6, 8]),
        ([5.0, 1.0, 3.0, 4.0], "max", 1, 2, [2, 8]),
        ([4.0, 3.0, 2.0, 1.0], "min", 1, 8, [8]),
        ([2.0, 2.0, 2.0, 2.0], None, 1, 2, [2, 8]),
        ([math.nan, 2.0, 3.0, 4.0], None, 1, 4, [4, 8]),
        ([3.0, math.nan, 5.0, 4.0], None, 1, 2, [2, 8]),
    ],
)
def test_the_best_stays(
    tmp_path: Path, values: list[float], mode: Any, keep: int, best: int, expected: list[int]
) -> None:
    checkpoint = Checkpoint(tmp_path, monitor="val_loss", mode=mode, keep=keep)
    fit(Scripted(values), checkpoint)
    assert steps_in(tmp_path) == expected
    assert checkpoint.best == values[best // 2 - 1]
    assert checkpoint.best_step == best
    assert checkpoint.best_path == tmp_path / f"step-{best:08d}"


@pytest.mark.parametrize(("name", "mode"), [("accuracy", "max"), ("acc", "max"), ("f1", "max"), ("error", "min")])
def test_the_best_accuracy_is_the_greatest(tmp_path: Path, name: str, mode: str) -> None:
    checkpoint = Checkpoint(tmp_path, monitor=f"val_{name}")
    fit(Scripted([0.2, 0.9, 0.1, 0.5], name), checkpoint)
    assert checkpoint.best == pytest.approx(0.9 if mode == "max" else 0.1)


def test_training_can_be_monitored(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, monitor="loss")
    trainer = fit(linear(), checkpoint, val=None)
    assert checkpoint.best == min(trainer.history["loss"])


def test_only_a_value_of_the_step_that_is_saved_counts(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, "1ep", monitor="val_loss", keep=1)
    model = Scripted([1.0, 5.0])
    fit(model, checkpoint, val_every="2ep")
    assert model.remaining == []
    assert (checkpoint.best, checkpoint.best_step) == (1.0, 4)
    assert steps_in(tmp_path) == [4, 8]


def test_a_save_between_validations_is_not_the_best(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, "1st", monitor="val_loss", keep=1)
    fit(Scripted([1.0, 3.0, 2.0, 4.0]), checkpoint)
    assert (checkpoint.best, checkpoint.best_step) == (1.0, 2)
    assert steps_in(tmp_path) == [2, 8]


def test_validation_comes_before_the_save_of_its_step(tmp_path: Path) -> None:
    # Lightning #20185: the file of a step carried the metric of the validation before.
    checkpoint = Checkpoint(tmp_path, "2st", monitor="val_loss", keep=9)
    fit(Scripted([4.0, 1.0, 3.0]), checkpoint, epochs=3, val_every="2st")
    assert (checkpoint.best, checkpoint.best_step) == (1.0, 4)


@pytest.mark.parametrize("monitor", ["val_acc", "val_error", "accuracy"])
def test_a_monitor_that_nothing_measures_is_refused(tmp_path: Path, monitor: str) -> None:
    with pytest.raises(pf.ParaflowError, match=rf"Nothing measures '{monitor}'; there is .*val_loss"):
        fit(Scripted([1.0] * 4), Checkpoint(tmp_path, monitor=monitor))


def test_monitoring_validation_without_validation_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pf.ParaflowError, match="fit was given no validation data"):
        fit(linear(), Checkpoint(tmp_path, monitor="val_loss"), val=None)


def test_the_best_survives_a_resume(tmp_path: Path) -> None:
    # keras #12803: the best began anew, and a better file was overwritten.
    fit(Scripted([1.0, 3.0]), Checkpoint(tmp_path, monitor="val_loss"), 2)
    checkpoint = Checkpoint(tmp_path, monitor="val_loss")
    trainer = fit(Scripted([2.0, 2.5]), checkpoint, 4, resume=tmp_path)
    assert trainer.history["val_loss"] == [1.0, 3.0, 2.0, 2.5]
    assert (checkpoint.best, checkpoint.best_step) == (1.0, 2)
    assert steps_in(tmp_path) == [2, 8]


def test_a_second_fit_begins_anew(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, monitor="val_loss")
    trainer = fit(Scripted([1.0] * 4), checkpoint)
    trainer.fit(Scripted([7.0, 6.0, 8.0, 9.0]), samples(8), VAL, batch_size=4)
    assert (checkpoint.best, checkpoint.best_step) == (6.0, 4)


def test_what_is_saved_is_the_model_of_that_step(tmp_path: Path) -> None:
    model = linear()
    weights: dict[int, torch.Tensor] = {}
    note = pf.callbacks.LambdaCallback(
        on_step_end=lambda trainer, logs: weights.update({trainer.step: model.state_dict()["weight"].clone()})
    )
    pf.Trainer(max_epochs=3, callbacks=[note, Checkpoint(tmp_path, 1, keep=9)], progress=False).fit(
        model, samples(8), batch_size=4
    )
    assert len(weights) == 6
    for step, weight in weights.items():
        loaded = linear()
        load_model(loaded, tmp_path / f"step-{step:08d}")
        assert torch.equal(loaded.state_dict()["weight"], weight)
    assert find(tmp_path) == tmp_path / "step-00000006"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mode": "best"}, r"mode must be 'min' or 'max', not 'best'"),
        ({"keep": 0}, r"keep must be a whole number of at least 1, not 0"),
        ({"keep": 1.5}, r"keep must be a whole number of at least 1, not 1\.5"),
        ({"every": "often"}, r"'often' is no interval"),
    ],
)
def test_arguments_of_another_kind_are_refused(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Checkpoint(tmp_path, **options)


KILLED = """
import os, sys, threading
import paraflow as pf
from paraflow.callbacks import Checkpoint
from paraflow.checkpoint import format as disk
from tests.callbacks.runs import linear, samples

folder, step, background = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
sync = disk.sync

def sync_or_die(path):
    if f"step-{int(step):08d}.writing" in str(path):
        os.kill(os.getpid(), 9)  # everything is written but not in its place
    sync(path)

disk.sync = sync_or_die
saving = Checkpoint(folder, 1, background=background)
pf.Trainer(max_steps=6, progress=False, callbacks=[saving]).fit(linear(), samples(8), batch_size=4)
"""


@pytest.mark.parametrize("background", [False, True])
def test_killed_while_saving_it_goes_on_from_the_one_before(tmp_path: Path, background: bool) -> None:
    result = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), "4", str(background)], timeout=120)
    assert result.returncode == -9
    assert steps_in(tmp_path) == [3]
    trainer = fit(linear(), Checkpoint(tmp_path, 1, background=background), 3, val=None, resume="auto")
    whole = linear()
    pf.Trainer(max_steps=6, progress=False).fit(whole, samples(8), batch_size=4)
    assert trainer.step == 6
    assert torch.equal(trainer.engine.module.weight, whole.weight)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006"]


def in_the_background(folder: str, steps: int | None, resume: Any) -> tuple[torch.Tensor, list[int], float | None]:
    model = linear()
    saving = Checkpoint(folder, 1, monitor="loss", keep=2, background=True)
    trainer = pf.Trainer(max_steps=steps or 9, progress=False, callbacks=[saving])
    trainer.fit(model, samples(8), batch_size=4, resume=resume)
    return model.weight.detach().clone(), steps_in(Path(folder)), saving.best


@pytest.mark.parametrize("size", [1, 2])
def test_saving_in_the_background_resumes_to_the_bit(ranks: Any, tmp_path: Path, size: int) -> None:
    whole = ranks(size, in_the_background, str(tmp_path / "whole"), None, None)
    ranks(size, in_the_background, str(tmp_path / "parts"), 5, None)
    rest = ranks(size, in_the_background, str(tmp_path / "parts"), None, "auto")
    for (weight, steps, best), (expected, expected_steps, expected_best) in zip(rest, whole, strict=True):
        assert torch.equal(weight, expected)
        assert steps == expected_steps
        assert steps[-2:] == [8, 9]
        assert best == expected_best


def test_a_save_that_failed_is_not_the_best_and_removes_nothing(tmp_path: Path) -> None:
    class Break(pf.Callback):
        def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
            if trainer.step == 4:  # a file in its way
                (tmp_path / ".step-00000004.writing").write_text("in the way")

    checkpoint = Checkpoint(tmp_path, monitor="val_loss", on_error="continue")
    trainer = pf.Trainer(max_epochs=4, progress=False, callbacks=[Break(), checkpoint])
    with pytest.warns(UserWarning, match="step-00000004.*could not be written.*Training goes on"):
        trainer.fit(Scripted([2.0, 1.0, 4.0, 3.0]), samples(8), VAL, batch_size=4)
    assert (checkpoint.best, checkpoint.best_step) == (2.0, 2)
    assert steps_in(tmp_path) == [2, 8]
