"""Writes numbers to a CSV file."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paraflow.errors import ParaflowError
from paraflow.interval import Interval
from paraflow.loggers.base import Event, Logger
from paraflow.loggers.support import writing

if TYPE_CHECKING:
    from paraflow.trainer import Trainer

_FIRST = ("step", "epoch")


class CSVLogger(Logger):
    """One row an epoch, and one for each logged step and each validation within an epoch.

    `Logger` says how numbers are named; columns are added as numbers appear. A row is with the operating system when
    its event is over. A resumed run goes on with the file, and drops the rows of steps that it will run again and a
    last row that was cut off. A new run begins the file anew. Rank 0 writes.

    Args:
        path: The file; its folder is made.
        every: How often a step is logged; None for epochs and validation only.

    Raises:
        ParaflowError: From `fit`: the file cannot be written, or a resumed run finds a file that is not a log.
    """

    def __init__(self, path: str | Path, every: Interval | str | int | None = 50) -> None:
        super().__init__(every)
        self.path = Path(path)
        self._columns: list[str] = []

    def begin(self, trainer: Trainer) -> None:
        """Begins the file, or goes on with it after a resume."""
        with writing(self, self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            kept = self._read_until(trainer.step) if trainer.step else []
            self._write_all(kept, list(dict.fromkeys(key for row in kept for key in row)) or list(_FIRST))

    def write(self, event: Event, step: int, epoch: int, numbers: dict[str, float]) -> None:
        """Adds a row."""
        row = {"step": step, "epoch": epoch, **numbers}
        new = [key for key in row if key not in self._columns]
        with writing(self, self.path):
            if new:
                self._write_all(self._read_until(step), [*self._columns, *new])
            with self.path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns, restval="").writerow(row)

    def _write_all(self, rows: list[dict[str, Any]], columns: list[str]) -> None:
        aside = self.path.with_name(f"{self.path.name}.new")  # a run that is killed meanwhile keeps its rows
        try:
            with aside.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore")
                writer.writeheader()
                writer.writerows(rows)
            os.replace(aside, self.path)
        finally:
            aside.unlink(missing_ok=True)
        self._columns = columns

    def _read_until(self, step: int) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        try:
            rows = list(csv.DictReader(io.StringIO(whole.decode("utf-8"), newline="")))
            return [row for row in rows if int(row["step"]) <= step]
        except (ValueError, KeyError, TypeError, csv.Error) as error:
            raise ParaflowError(
                f"{str(self.path)!r} is not a log to go on with: it has a row without a step ({error!r}). "
                "Give CSVLogger another path."
            ) from error
