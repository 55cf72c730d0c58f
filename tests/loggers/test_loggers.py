"""What holds for every logger."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import paraflow as pf
from paraflow.callbacks import Callback, Checkpoint, LambdaCallback
from paraflow.errors import ParaflowError
from paraflow.interval import Interval
from paraflow.loggers.base import Logger
from paraflow.trigger import Trigger
from tests.callbacks.runs import Scripted, linear, samples
from tests.loggers.reading import KINDS, Kind, Log
from tests.pool import Pool

_QUIET = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", "MLFLOW_ALLOW_FILE_STORE": "true"}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kind:
    kind = KINDS[request.param]
    if kind.package is not None:
        pytest.importorskip(kind.package)
    for name, value in _QUIET.items():
        monkeypatch.setenv(name, value)
    return kind


class Watch(Callback):
    """Keeps what each step gave; fails at one, where it is told to; adds numbers to the logs."""

    def __init__(self, fail_at: int = -1) -> None:
        self.losses: dict[int, float] = {}
        self.fail_at = fail_at

    def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.losses[trainer.step] = logs["loss"]
        if trainer.step == self.fail_at:
            raise RuntimeError("the fifth step, say")

    def on_epoch_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        logs["best"] = torch.tensor([0.5])


def close(values: Any) -> Any:
    return pytest.approx(values, rel=1e-6, nan_ok=True)  # TensorBoard holds 32 bits


def test_names_steps_and_values_are_the_same_in_all(kind: Kind, tmp_path: Path) -> None:
    watch, logger = Watch(), kind.make(tmp_path, every=2)
    trainer = pf.Trainer(
        max_epochs=2, callbacks=[watch], loggers=[logger], progress=False, clip_norm=1e9, val_every="2st"
    )
    model = Scripted([5.0, 7.0, math.nan])
    history = trainer.fit(model, samples(9), samples(3), batch_size=3)
    model.remaining = [99.0]
    trainer.evaluate(model, samples(4))  # is no part of the run
    log = kind.read(tmp_path)
    assert log.series["loss"] == close({step: watch.losses[step] for step in (2, 4, 6)})
    assert log.series["lr"] == close(dict.fromkeys((2, 4, 6), 0.1))
    assert log.series["val_loss"] == close({2: 5.0, 4: 7.0, 6: math.nan})
    assert log.series["epoch_loss"] == close(dict(zip((3, 6), history["loss"], strict=True)))
    assert log.series["epoch_best"] == {3: 0.5, 6: 0.5}
    assert set(log.series) == {"loss", "lr", "grad_norm", "val_loss", "epoch_loss", "epoch_lr", "epoch_best"}
    if not isinstance(logger, KINDS["csv"].make(tmp_path).__class__):
        assert log.status == "finished"
        assert log.plan is not None
        assert float(log.plan["clip_norm"]) == 1e9


def test_epochs_only_without_a_word_from_steps(kind: Kind, tmp_path: Path) -> None:
    trainer = pf.Trainer(max_epochs=2, loggers=[kind.make(tmp_path, every=None)], progress=False)
    history = trainer.fit(linear(), samples(8), samples(4), batch_size=4)
    series = kind.read(tmp_path).series
    assert set(series) == {"epoch_loss", "epoch_lr", "val_loss"}
    assert series["val_loss"] == close(dict(zip((2, 4), history["val_loss"], strict=True)))


def _run(kind: Kind, folder: Path, epochs: int, fail_at: int = -1, **more: Any) -> Log:
    saving = Checkpoint(folder / "saved", "1ep", keep=9)
    trainer = pf.Trainer(
        max_epochs=epochs, callbacks=[Watch(fail_at), saving], loggers=[kind.make(folder, every=1)], progress=False
    )
    trainer.fit(linear(), samples(8), samples(4), batch_size=4, **more)
    return kind.read(folder)


def test_a_failed_run_says_so_and_a_resumed_one_ends_as_if_nothing_had_been(kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = _run(kind, tmp_path / "whole", 3)
    assert set(whole.series["loss"]) == {1, 2, 3, 4, 5, 6}
    with pytest.raises(RuntimeError, match="fifth"):
        _run(kind, tmp_path / "parts", 3, fail_at=5)
    failed = kind.read(tmp_path / "parts")
    assert set(failed.series["loss"]) == {1, 2, 3, 4}
    assert failed.status in ("failed", None)
    assert (failed.status is None) == (whole.status is None)
    resumed = _run(kind, tmp_path / "parts", 3, resume=tmp_path / "parts" / "saved" / "step-00000002")
    assert resumed.series == whole.series
    assert resumed.status == whole.status


def _on_two_ranks(name: str, folder: str) -> tuple[list[float], list[str]]:
    import os

    os.environ.update(_QUIET)
    logger = KINDS[name].make(Path(folder), every=1)
    said: list[str] = []
    trainer = pf.Trainer(max_epochs=1, loggers=[logger], progress=False)
    history = trainer.fit(linear(), samples(8), batch_size=4)
    begun = [type(logger).__name__ for value in [getattr(logger, "run_id", None)] if value]
    return history["loss"], said + begun


def test_one_rank_of_two_writes(kind: Kind, tmp_path: Path, ranks: Pool) -> None:
    name = next(name for name, other in KINDS.items() if other is kind)
    (losses, first), (same, second) = ranks(2, _on_two_ranks, name, str(tmp_path))
    assert losses == same
    assert kind.read(tmp_path).series["epoch_loss"] == close({2: losses[0]})  # no point is there twice
    assert not second
    assert len(first) == (name in ("wandb", "mlflow"))


class Recorder(Logger):
    """Keeps what it is told to write."""

    def __init__(self, every: Any = 1) -> None:
        super().__init__(every)
        self.written: list[tuple[str, int, int, dict[str, float]]] = []

    def write(self, event: Any, step: int, epoch: int, numbers: dict[str, float]) -> None:
        self.written.append((event, step, epoch, numbers))


def _add(trainer: pf.Trainer, logs: dict[str, Any]) -> None:
    logs.update(flag=True, words="many", none=None, pair=torch.ones(2), step=7, one=torch.tensor([2]))


def test_what_is_no_number_is_left_out_with_one_warning() -> None:
    recorder = Recorder()
    trainer = pf.Trainer(max_steps=2, callbacks=[LambdaCallback(on_step_end=_add)], loggers=[recorder], progress=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(linear(), samples(8), batch_size=4)
    steps = [numbers for event, _, _, numbers in recorder.written if event == "step"]
    assert [sorted(numbers) for numbers in steps] == [["flag", "loss", "lr", "one"]] * 2
    assert steps[0]["flag"] == 1.0
    assert steps[0]["one"] == 2.0
    said = [str(warning.message) for warning in caught if "leaves out" in str(warning.message)]
    assert [text.split("'")[1] for text in said] == ["words", "none", "pair", "step"]
    assert "shape (2,)" in said[2]


def test_a_run_that_validation_stops_has_its_result_once() -> None:
    recorder = Recorder(None)
    stop = LambdaCallback(on_validation_end=lambda trainer, logs: trainer.stop())
    trainer = pf.Trainer(max_epochs=3, callbacks=[stop], loggers=[recorder], progress=False, val_every=1)
    trainer.fit(Scripted([5.0, 6.0]), samples(12), samples(4), batch_size=4)
    assert [(event, step, numbers.get("val_loss")) for event, step, _, numbers in recorder.written] == [
        ("validation", 1, 5.0),
        ("epoch", 1, None),
    ]


def test_a_logger_of_epochs_is_due_with_no_step() -> None:
    never = Trigger(Interval.parse(Recorder(None).every))
    assert not any(never.at_step(step) or never.at_epoch(step) for step in range(1, 10_000))
    recorder = Recorder(None)
    pf.Trainer(max_steps=4, loggers=[recorder], progress=False).fit(linear(), samples(16), batch_size=4)
    assert [event for event, *_ in recorder.written] == ["epoch"]


class Broken(Recorder):
    def begin(self, trainer: pf.Trainer) -> None:
        raise ParaflowError("The folder is not there.")


def _broken_on_two_ranks() -> str:
    try:
        pf.Trainer(max_epochs=1, loggers=[Broken()], progress=False).fit(linear(), samples(8), batch_size=4)
    except ParaflowError as error:
        return str(error)
    return ""


def test_a_log_that_cannot_be_opened_ends_every_rank(ranks: Pool) -> None:
    assert ranks(2, _broken_on_two_ranks) == [
        "The folder is not there.",
        "Broken could not begin on rank 0, which says why.",
    ]


class BreaksAtTheEnd(Recorder):
    def end(self, step: int, error: BaseException | None) -> None:
        raise ParaflowError(f"no end at {step} after {type(error).__name__}")


def test_a_failure_while_closing_does_not_hide_what_was_raised() -> None:
    trainer = pf.Trainer(max_epochs=1, callbacks=[Watch(fail_at=2)], loggers=[BreaksAtTheEnd()], progress=False)
    with (
        pytest.warns(UserWarning, match="BreaksAtTheEnd could not close its log: no end at 2 after RuntimeError"),
        pytest.raises(RuntimeError, match="fifth"),
    ):
        trainer.fit(linear(), samples(8), batch_size=4)


def test_an_interval_that_does_not_parse_is_refused_when_the_logger_is_made() -> None:
    with pytest.raises(ValueError, match="'often' is no interval"):
        Recorder("often")
    with pytest.raises(ValueError, match="0 is no interval"):
        Recorder(0)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_named_when_the_logger_is_made(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # what Python takes for "not installed"
    with pytest.raises(ParaflowError, match=rf"needs {name}: pip install 'paraflow\[{name}\]'"):
        KINDS[name].make(tmp_path)


def test_a_folder_of_the_packages_name_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paraflow.loggers.support import require_package

    (tmp_path / "mere_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    with pytest.raises(ParaflowError, match="X needs mere_folder"):
        require_package("mere_folder", "X", "x")


def test_making_a_logger_imports_nothing(tmp_path: Path) -> None:
    heavy = ["tensorboard", "torch.utils.tensorboard", "wandb", "mlflow", "sqlalchemy"]
    code = (
        "import sys, pathlib, paraflow\n"
        "from tests.loggers.reading import KINDS\n"
        "from importlib.util import find_spec\n"
        "for kind in KINDS.values():\n"
        "    if kind.package is None or find_spec(kind.package):\n"
        f"        kind.make(pathlib.Path({str(tmp_path)!r}), every=5)\n"
        f"print(*[m for m in {heavy} if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert result.stdout.strip() == ""
