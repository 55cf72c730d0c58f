"""Writes numbers to TensorBoard's event files."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paraflow.interval import Interval
from paraflow.loggers.base import Event, Logger
from paraflow.loggers.support import configuration, require_package, writing

if TYPE_CHECKING:
    from paraflow.trainer import Trainer


class TensorBoardLogger(Logger):
    """Writes scalars for TensorBoard, and as text the run's configuration and how it ended.

    `Logger` says how numbers are named. They are in the file when their event is over. A resumed run adds a file that
    hides the numbers of steps which it will run again; a new run in a used folder hides all that was there. TensorBoard
    holds 32-bit floats. Rank 0 writes.

    Args:
        folder: Where event files are written; one a run, as TensorBoard shows each folder as a run.
        every: How often a step is logged; None for epochs and validation only.

    Raises:
        ParaflowError: tensorboard is not installed; or from `fit`: the folder cannot be written.
    """

    def __init__(self, folder: str | Path, every: Interval | str | int | None = 50) -> None:
        require_package("tensorboard", "TensorBoardLogger", "tensorboard")
        super().__init__(every)
        self.folder = Path(folder)
        self._writer: Any = None

    def begin(self, trainer: Trainer) -> None:
        """Begins an event file."""
        module = import_module("torch.utils.tensorboard")
        with writing(self, self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            first = trainer.step + 1 if trainer.step else 0
            self._writer = module.SummaryWriter(str(self.folder), purge_step=first)
            self._writer.add_text("configuration", _as_code(configuration(trainer)), trainer.step)
            self._writer.flush()

    def write(self, event: Event, step: int, epoch: int, numbers: dict[str, float]) -> None:
        """Adds a scalar for each number."""
        with writing(self, self.folder):
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def end(self, step: int, error: BaseException | None) -> None:
        """Says how the run ended, and closes the file."""
        writer, self._writer = self._writer, None
        with writing(self, self.folder):
            try:
                status = "finished" if error is None else f"failed: {type(error).__name__}: {error}"
                writer.add_text("status", status, step)
            finally:
                writer.close()


def _as_code(values: dict[str, Any]) -> str:
    """Markdown that TensorBoard shows as it stands: lines that begin with four blanks."""
    lines = json.dumps(values, indent=2, default=str).splitlines()
    return "\n".join(f"    {line}" for line in lines)
