"""Saves a run at intervals; keeps the last checkpoints and the best."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paraflow.callbacks.base import Callback
from paraflow.checkpoint.run import PREFIX
from paraflow.errors import ParaflowError
from paraflow.interval import Interval
from paraflow.trigger import Trigger

if TYPE_CHECKING:
    from paraflow.trainer import Trainer

Mode = Literal["min", "max"]


class Checkpoint(Callback):
    """Saves everything a run needs to go on: ``fit(..., resume=folder)`` takes it up.

    It saves between steps only, after the validation and callbacks that end with a step, and at the run's end. The new
    checkpoint is whole before an old one is removed; the last and the best always stay.

    Args:
        folder: Where checkpoints are written, each in a folder named by its step.
        every: How often.
        monitor: The metric whose best checkpoint is kept, such as ``"val_loss"``. Only a value that was measured at the
            step that is saved counts.
        mode: Whether the best is the ``"min"`` or the ``"max"``; by default the greatest accuracy, the least of others.
        keep: How many of the last are kept.

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
    ) -> None:
        if mode not in (None, "min", "max"):
            raise ValueError(f"mode must be 'min' or 'max', not {mode!r}.")
        if not isinstance(keep, int) or keep < 1:
            raise ValueError(
                f"keep must be a whole number of at least 1, not {keep!r}: the last checkpoint always stays."
            )
        self.folder = Path(folder)
        self.monitor = monitor
        self.mode: Mode = mode or ("max" if monitor and _greater_is_better(monitor) else "min")
        self.keep = keep
        self.best: float | None = None
        self.best_step: int | None = None
        self._saved: list[int] = []
        self._interval = Interval.parse(every)
        self._trigger = Trigger(self._interval)

    @property
    def best_path(self) -> Path | None:
        """The best checkpoint so far, or None where nothing is monitored or measured."""
        return None if self.best_step is None else self._path(self.best_step)

    def on_train_begin(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Begins to count."""
        if not trainer.step:
            self.best, self.best_step, self._saved = None, None, []
        if self.monitor is not None and self.monitor.startswith("val_") and not trainer.validates:
            raise ParaflowError(f"Checkpoint monitors {self.monitor!r}, and fit was given no validation data.")
        self._trigger = Trigger(self._interval, trainer.mesh.broadcast)
        self._trigger.start(trainer.step)

    def on_checkpoint(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Saves if it is time, or the run ends here."""
        due = self._trigger.at_step(trainer.step)
        due = due or (trainer.epoch_complete and self._trigger.at_epoch(trainer.epoch))
        if not due and not trainer.finishing:
            return
        self._note_best(trainer)
        self._saved = [step for step in self._saved if step != trainer.step] + [trainer.step]
        trainer.save(self._path(trainer.step))
        self._remove_old(is_main=trainer.is_main)

    def _note_best(self, trainer: Trainer) -> None:
        if self.monitor is None:
            return
        trainer.history.require(self.monitor, validates=trainer.validates and not trainer.finishing)
        value = trainer.history.measured(self.monitor, trainer.step)
        if value is None or math.isnan(value):
            return
        if self.best is None or (value < self.best if self.mode == "min" else value > self.best):
            self.best, self.best_step = value, trainer.step

    def _remove_old(self, *, is_main: bool) -> None:
        """Removes what this run has written and needs no more; what another run left in the folder is not touched."""
        for old in self._saved[: -self.keep]:
            if is_main and old != self.best_step:
                shutil.rmtree(self._path(old), ignore_errors=True)
        self._saved = [saved for saved in self._saved if saved == self.best_step or saved in self._saved[-self.keep :]]

    def _path(self, step: int) -> Path:
        return self.folder / f"{PREFIX}{step:08d}"

    def state_dict(self) -> dict[str, Any]:
        """Returns the best value, its step, and the steps that were saved."""
        return {"best": self.best, "best_step": self.best_step, "saved": list(self._saved)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes them up."""
        self.best, self.best_step, self._saved = state["best"], state["best_step"], list(state["saved"])


def _greater_is_better(monitor: str) -> bool:
    return any(mark in monitor for mark in ("acc", "auroc", "f1", "precision", "recall", "r2"))
