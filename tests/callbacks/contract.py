"""A row for each callback and logger, and small runs with them."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import paraflow as pf
from paraflow.checkpoint.image import take_apart

X = torch.randn(24, 5, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (24,), generator=torch.Generator().manual_seed(2))
STEPS_AN_EPOCH, EPOCHS, STOP = 4, 3, 6  # the stop is in the middle of the second epoch


class Kept(pf.loggers.Logger):
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__(every=1)
        self.written: list[tuple[Any, ...]] = []

    def write(self, event: Any, step: int, epoch: int, numbers: dict[str, float]) -> None:
        self.written.append((event, step, epoch, sorted(numbers)))


@dataclass(frozen=True)
class Row:
    """A callback, made for a folder.

    Attributes:
        of: The class.
        make: Makes one.
        changes: Whether it changes what the model becomes, on purpose.
        keeps: Whether it has state.
        timed: Whether its state holds times.
        package: What must be installed.
    """

    of: type
    make: Callable[[Path], pf.Callback]
    changes: bool = False
    keeps: bool = False
    timed: bool = False
    package: str | None = None


callbacks, loggers = pf.callbacks, pf.loggers
TABLE: dict[str, Row] = {
    "plain": Row(callbacks.Callback, lambda folder: callbacks.Callback()),
    "batch size finder": Row(callbacks.BatchSizeFinder, lambda folder: callbacks.BatchSizeFinder(2, 4, seconds=1e-3)),
    "checkpoint": Row(
        callbacks.Checkpoint,
        lambda folder: callbacks.Checkpoint(folder / "own", "1st", monitor="val_loss", keep=2),
        keeps=True,
    ),
    "checkpoint in the background": Row(
        callbacks.Checkpoint,
        lambda folder: callbacks.Checkpoint(folder / "own", "3st", monitor="loss", background=True),
        keeps=True,
    ),
    "early stopping": Row(
        callbacks.EarlyStopping, lambda folder: callbacks.EarlyStopping("loss", patience=9), keeps=True
    ),
    "early stopping that stops": Row(
        callbacks.EarlyStopping,
        lambda folder: callbacks.EarlyStopping("loss", mode="max", patience=1, restore_best=True),
        changes=True,
        keeps=True,
    ),
    "average": Row(callbacks.EMA, lambda folder: callbacks.EMA(0.7, update_every=2), keeps=True),
    "average that stays": Row(
        callbacks.EMA, lambda folder: callbacks.EMA(0.7, start_step=2, swap_at_end=True), changes=True, keeps=True
    ),
    "stochastic average": Row(
        callbacks.StochasticWeightAveraging,
        lambda folder: callbacks.StochasticWeightAveraging(3, "2st", 0.05, anneal=5),
        changes=True,
        keeps=True,
    ),
    "functions": Row(
        callbacks.LambdaCallback, lambda folder: callbacks.LambdaCallback(on_step_end=lambda trainer, logs: None)
    ),
    "rate finder": Row(callbacks.LearningRateFinder, lambda folder: callbacks.LearningRateFinder(1e-4, 10.0, 12)),
    "rate finder that applies": Row(
        callbacks.LearningRateFinder,
        lambda folder: callbacks.LearningRateFinder(1e-4, 10.0, 20, apply=True),
        changes=True,
    ),
    "rates": Row(
        callbacks.LearningRateMonitor, lambda folder: callbacks.LearningRateMonitor(momentum=True, weight_decay=True)
    ),
    "memory": Row(callbacks.MemoryMonitor, lambda folder: callbacks.MemoryMonitor(1)),
    "summary": Row(callbacks.ModelSummary, lambda folder: callbacks.ModelSummary()),
    "guard": Row(callbacks.NaNGuard, lambda folder: callbacks.NaNGuard()),
    "profiler": Row(callbacks.Profiler, lambda folder: callbacks.Profiler(folder / "traces", 1, 1, 2)),
    "bar": Row(callbacks.ProgressBar, lambda folder: callbacks.ProgressBar()),
    "throughput": Row(callbacks.Throughput, lambda folder: callbacks.Throughput(1)),
    "time": Row(
        callbacks.TimeLimit, lambda folder: callbacks.TimeLimit("1h", over_resumes=True), keeps=True, timed=True
    ),
    "kept": Row(loggers.Logger, lambda folder: Kept()),
    "csv": Row(loggers.CSVLogger, lambda folder: loggers.CSVLogger(folder / "log.csv", 1)),
    "lines": Row(loggers.JSONLinesLogger, lambda folder: loggers.JSONLinesLogger(folder / "log.jsonl", 1)),
    "board": Row(
        loggers.TensorBoardLogger,
        lambda folder: loggers.TensorBoardLogger(folder / "board", 1),
        package="tensorboard",
    ),
    "wandb": Row(
        loggers.WandbLogger,
        lambda folder: loggers.WandbLogger("tests", folder=folder, mode="offline"),
        keeps=True,
        package="wandb",
    ),
    "mlflow": Row(
        loggers.MLflowLogger,
        lambda folder: loggers.MLflowLogger("tests", tracking_uri=f"sqlite:///{folder.absolute() / 'mlflow.db'}"),
        keeps=True,
        package="mlflow",
    ),
}


class Stop(pf.Callback):
    """Ends a run after a step, on one rank's wish."""

    def on_after_optimizer_step(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        if trainer.step + 1 == STOP and pf.rank() == 0:
            trainer.stop()

    def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        """The ranks agree on stopping after it."""


class Grab(pf.Callback):
    """Keeps what all callbacks' state is after a step in the middle of an epoch."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.weights: dict[str, torch.Tensor] = {}

    def on_checkpoint(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        if trainer.step == STOP:
            self.state = copy.deepcopy({key: c.state_dict() for key, c in trainer.dispatcher._keyed() if c is not self})
            self.weights = copy.deepcopy(trainer.engine.state_dict()["model"])


def net() -> nn.Module:
    torch.manual_seed(3)
    body = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    return pf.configure(body, optimizer="adamw", lr=1e-2, schedule="cosine", loss="cross_entropy")


def make(name: str, folder: str) -> pf.Callback:
    made = TABLE[name].make(Path(folder))
    assert type(made) is TABLE[name].of or isinstance(made, Kept)
    return made


def fit(
    mine: pf.Callback | None, folder: str, *, stop: bool = False, resume: bool = False, more: tuple[Any, ...] = ()
) -> dict[str, torch.Tensor]:
    """Three epochs, or six steps of them, with a callback; returns the weights."""
    model = net()
    saving = [callbacks.Checkpoint(Path(folder) / "kept", STOP)] if stop or resume else []
    listed = [*([] if mine is None or isinstance(mine, loggers.Logger) else [mine]), *([Stop()] if stop else []), *more]
    logging = [mine] if isinstance(mine, loggers.Logger) else []
    trainer = pf.Trainer(
        max_epochs=EPOCHS, progress=False, clip_norm=1.0, callbacks=[*listed, *saving], loggers=logging
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Pp]rofiler")
        trainer.fit(model, (X, Y), (X, Y), batch_size=6, resume=Path(folder) / "kept" if resume else None)
    assert not stop or trainer.step <= STOP
    return copy.deepcopy(trainer.engine.state_dict()["model"])


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in right)


def plainly(state: Any) -> tuple[str, dict[str, torch.Tensor]]:
    image = take_apart(state)
    return json.dumps(image.plain), dict(image.tensors)


def equal(left: Any, right: Any) -> bool:
    (mine, my_tensors), (theirs, their_tensors) = plainly(left), plainly(right)
    return mine == theirs and same(my_tensors, their_tensors)
