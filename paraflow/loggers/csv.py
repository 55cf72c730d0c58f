"""Writes numbers to a CSV file."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paraflow.callbacks.base import Callback
from paraflow.interval import Interval

if TYPE_CHECKING:
    from paraflow.trainer import Trainer

_FIRST = ("step", "epoch")


class CSVLogger(Callback):
    """One row an epoch and one for each logged step; columns are added as numbers appear. Rank 0 writes.

    A row is on the disk when its event is over. A resumed run goes on with the file, and drops the rows of steps that
    it will run again.

    Args:
        path: The file; its folder is made.
        every: How often a step is logged; None for epochs only.
    """

    def __init__(self, path: str | Path, every: Interval | str | int | None = 50) -> None:
        self.path = Path(path)
        self.every = every or "1000000000ep"
        self._columns: list[str] = []

    def on_train_begin(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Begins the file, or goes on with it after a resume."""
        if not trainer.is_main:
            return
        self._columns = []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = self._read_until(trainer.step) if trainer.step else []
        self._write(kept, list(dict.fromkeys(key for row in kept for key in row)) or list(_FIRST))

    def on_step_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Adds a row for the step."""
        self._add(trainer, logs)

    def on_epoch_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Adds a row for the epoch: its training means and validation."""
        self._add(trainer, {f"epoch_{key}" if not key.startswith("val_") else key: v for key, v in logs.items()})

    def _add(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        if not trainer.is_main:
            return
        row = {"step": trainer.step, "epoch": trainer.current_epoch + 1, **logs}
        new = [key for key in row if key not in self._columns]
        if new:
            self._write(self._read_until(trainer.step), [*self._columns, *new])
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns, restval="").writerow(row)

    def _write(self, rows: list[dict[str, Any]], columns: list[str]) -> None:
        self._columns = columns
        with self.path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)

    def _read_until(self, step: int) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        with self.path.open(newline="", encoding="utf-8") as file:
            return [row for row in csv.DictReader(file) if int(row["step"]) <= step]
