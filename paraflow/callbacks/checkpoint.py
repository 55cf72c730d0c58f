"""Saves a run at intervals; keeps the last checkpoints and the best."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paraflow.callbacks.base import Callback
from paraflow.callbacks.monitor import Mode, Monitor
from paraflow.callbacks.retention import Retention
from paraflow.checkpoint.folders import PREFIX, prepare
from paraflow.checkpoint.run import save, settle
from paraflow.checkpoint.writer import Writer, size_of_part
from paraflow.errors import CheckpointError
from paraflow.interval import Interval
from paraflow.trigger import Trigger

if TYPE_CHECKING:
    from paraflow.trainer import Trainer


class Checkpoint(Callback):
    """Saves everything a run needs to go on: ``fit(..., resume="auto")`` takes it up.

    It saves between steps only, after the validation and callbacks that end with a step, and at the run's end. The new
    checkpoint is whole before an old one is removed; the last and the best always stay.

    Args:
        folder: Where checkpoints are written, each in a folder named by its step; where all ranks can read.
        every: How often.
        monitor: The metric whose best checkpoints are kept, such as ``"val_loss"``. Only a value that was measured at
            the step that is saved counts.
        mode: Whether the best is the ``"min"`` or the ``"max"``; needed where the metric's name does not tell.
        keep: How many of the last are kept.
        keep_best: How many of the best are kept.
        background: Whether training goes on while a checkpoint is written. It takes as much host memory as the state.
        on_error: What becomes of the run where a checkpoint cannot be written (a full disk): ``"raise"``, or
            ``"continue"`` with a warning. What was saved before stays as it is.

    Raises:
        ValueError: An argument is not of its kind.
    """

    def __init__(
        self,
        folder: str | Path,
        every: Interval | str | int = "1ep",
        *,
        monitor: str | None = None,
        mode: Mode | None = None,
        keep: int = 1,
        keep_best: int = 1,
        background: bool = False,
        on_error: Literal["raise", "continue"] = "raise",
    ) -> None:
        if on_error not in ("raise", "continue"):
            raise ValueError(f"on_error must be 'raise' or 'continue', not {on_error!r}.")
        if mode not in (None, "min", "max"):
            raise ValueError(f"mode must be 'min' or 'max', not {mode!r}.")
        self.folder = Path(folder)
        self.monitor = None if monitor is None else Monitor.of(monitor, mode)
        greatest = self.monitor is not None and self.monitor.mode == "max"
        self._retention = Retention(keep, keep_best, greatest=greatest)
        self.on_error = on_error
        self._writer = Writer(background=background)
        self._interval = Interval.parse(every)
        self._trigger = Trigger(self._interval)

    @property
    def last_path(self) -> Path | None:
        """The last checkpoint, or None."""
        return self._path(self._retention.saved[-1]) if self._retention.saved else None

    @property
    def best(self) -> float | None:
        """The best value that was saved so far, or None."""
        return next((value for value, _ in self._retention.bests()), None)

    @property
    def best_step(self) -> int | None:
        """Its step."""
        return next((step for _, step in self._retention.bests()), None)

    @property
    def best_path(self) -> Path | None:
        """Its checkpoint."""
        return None if self.best_step is None else self._path(self.best_step)

    def on_train_begin(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Begins to count."""
        if not trainer.step:
            self._retention.reset()
        if self.monitor is not None:
            self.monitor.require_data(trainer, "Checkpoint")
        self._tell(trainer, prepare(self.folder, trainer.mesh))
        self._trigger = Trigger(self._interval, trainer.mesh.agree)
        self._trigger.start(trainer.step)

    def on_checkpoint(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Saves if it is time, or the run ends here."""
        due = self._trigger.at_step(trainer.step)
        due = due or (trainer.epoch_complete and self._trigger.at_epoch(trainer.epoch))
        if not due and not trainer.finishing:
            if self._writer.background:
                self._writer.reserve(lambda: size_of_part(trainer.engine))
            return
        self._settle(trainer)
        self._retention.add(trainer.step, None if self.monitor is None else self.monitor.value(trainer))
        replaces = [self._path(step) for step in self._retention.unneeded()]
        save(trainer.state_dict(), trainer.mesh, self._path(trainer.step), self._writer, replaces)
        if not self._writer.background or trainer.finishing:
            self._settle(trainer)

    def _settle(self, trainer: Trainer) -> None:
        """Waits for the last save, and learns whether it is there."""
        if not self._retention.saved:
            return
        failure = settle(self._writer, trainer.mesh)
        if failure is None:
            self._retention.drop(self._retention.unneeded())
            return
        self._retention.drop(self._retention.saved[-1:])
        self._tell(trainer, failure)

    def _tell(self, trainer: Trainer, failure: str | None) -> None:
        if failure is not None and self.on_error == "raise":
            raise CheckpointError(failure)
        if failure is not None and trainer.is_main:
            warnings.warn(f"{failure} Training goes on.", stacklevel=2)

    def on_exception(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Lets a save that has begun come to its end; the other ranks may be gone, so they are not asked."""
        failure = self._writer.settle()
        if failure is not None:
            warnings.warn(str(failure), stacklevel=2)

    def _path(self, step: int) -> Path:
        return self.folder / f"{PREFIX}{step:08d}"

    def state_dict(self) -> dict[str, Any]:
        """Returns the steps that were saved, what was measured of which metric at them, and the best of them."""
        return {**self._retention.state_dict(), "monitor": None if self.monitor is None else self.monitor.name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes them up."""
        self._retention.load_state_dict(state)
