"""Shows how a run gets on: a live bar on a terminal, a line an epoch elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from paraflow.callbacks.base import Callback
from paraflow.interval import Interval

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from paraflow.trainer import Trainer


class ProgressBar(Callback):
    """Prints each epoch's numbers, and on a terminal a bar of the epoch's steps while it runs. Rank 0 prints.

    Args:
        every: How often the bar moves.
    """

    def __init__(self, every: Interval | str | int = "0.2s") -> None:
        self.every = every
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._epoch_began = 0.0
        self._steps_before = 0

    def on_epoch_begin(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Begins a bar."""
        self._epoch_began = time.monotonic()
        self._steps_before = trainer.step
        if not trainer.is_main or not trainer.console.is_terminal:
            return
        self._progress = self._bar(trainer)
        self._progress.start()
        self._task = self._progress.add_task(_epoch_name(trainer), total=trainer.steps_per_epoch, numbers="")

    def _bar(self, trainer: Trainer) -> Progress:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[numbers]}"),
        )
        return Progress(*columns, console=trainer.console, transient=True)

    def on_step_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Moves the bar."""
        if self._progress is not None and self._task is not None:
            done = trainer.step - self._steps_before
            self._progress.update(self._task, completed=done, numbers=_numbers(logs))

    def on_epoch_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Prints the epoch's line."""
        self._stop()
        if not trainer.is_main:
            return
        seconds = time.monotonic() - self._epoch_began
        steps = trainer.step - self._steps_before
        of = f"{steps} step{'' if steps == 1 else 's'}, {seconds:.1f} s"
        trainer.console.print(
            f"{_epoch_name(trainer)}  {_numbers(logs)}  [dim]{of}[/dim]",
            highlight=False,
            soft_wrap=True,
        )

    def on_train_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Gives the terminal back."""
        self._stop()

    def on_exception(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Gives the terminal back."""
        self._stop()

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _epoch_name(trainer: Trainer) -> str:
    number = trainer.current_epoch + 1
    of = f"/{trainer.limits.epochs}" if trainer.limits.epochs else ""
    return f"epoch {number}{of}"


def _numbers(logs: dict[str, Any]) -> str:
    shown = (f"{key} {value:.4g}" for key, value in logs.items() if isinstance(value, float))
    return "  ".join(shown)
