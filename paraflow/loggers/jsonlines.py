"""Writes numbers to a file of JSON lines."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paraflow.errors import ParaflowError
from paraflow.interval import Interval
from paraflow.loggers.base import Event, Logger
from paraflow.loggers.support import configuration, status_of, writing

if TYPE_CHECKING:
    from paraflow.trainer import Trainer


class JSONLinesLogger(Logger):
    """One JSON object a line for each start, logged step, validation within an epoch, epoch and end of a fit.

    Each line has ``event`` (``"start"``, ``"step"``, ``"validation"``, ``"epoch"`` or ``"end"``), ``step`` (optimizer
    steps that are done), ``epoch`` (from 1) and ``time`` (seconds since 1970); `Logger` says how numbers are named.
    ``"start"`` has ``plan``, ``seed`` and ``versions``; ``"end"`` has ``status``, ``"finished"`` or ``"failed"``, and
    then ``error``. Numbers that JSON lacks are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``: `float` reads
    them all.

    A line is with the operating system when its event is over, so a run that is killed leaves at most one torn last
    line. A resumed run goes on with the file, and drops a torn line and the lines of steps that it will run again. A
    new run begins the file anew. Rank 0 writes.

    Args:
        path: The file; its folder is made.
        every: How often a step is logged; None for epochs and validation only.

    Raises:
        ParaflowError: From `fit`: the file cannot be written, or a resumed run finds a file that is not a log.
    """

    def __init__(self, path: str | Path, every: Interval | str | int | None = 50) -> None:
        super().__init__(every)
        self.path = Path(path)

    def begin(self, trainer: Trainer) -> None:
        """Begins the file, or goes on with it after a resume."""
        with writing(self, self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if trainer.step and self.path.exists():
                self._drop_after(trainer.step)
            else:
                self.path.write_bytes(b"")
        self._add("start", trainer.step, trainer.epoch + 1, configuration(trainer))

    def write(self, event: Event, step: int, epoch: int, numbers: dict[str, float]) -> None:
        """Adds a line."""
        self._add(event, step, epoch, numbers)

    def end(self, step: int, error: BaseException | None) -> None:
        """Adds the last line."""
        status = status_of(error)
        why = {"error": f"{type(error).__name__}: {error}".removesuffix(": ")} if status == "failed" else {}
        self._add("end", step, self._epoch, {"status": status, **why})

    def _add(self, event: str, step: int, epoch: int, content: dict[str, Any]) -> None:
        self._epoch = epoch
        record = {"event": event, "step": step, "epoch": epoch, "time": time.time(), **content}
        line = (json.dumps(_plain(record), allow_nan=False, default=str) + "\n").encode()
        with writing(self, self.path), self.path.open("ab", buffering=0) as file:
            start = file.seek(0, os.SEEK_END)
            written = file.write(line)
            if written != len(line):  # a full disk takes a part; what is written next must begin a line
                file.truncate(start)
                raise OSError(f"there is room for {written} of a line's {len(line)} bytes")

    def _drop_after(self, step: int) -> None:
        kept = 0
        with self.path.open("rb+") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n") or self._step_of(line, number) > step:
                    break
                kept += len(line)
            file.truncate(kept)

    def _step_of(self, line: bytes, number: int) -> int:
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise ParaflowError(
                f"{str(self.path)!r} is not a log to go on with: line {number} is no JSON object with a step. "
                "Give JSONLinesLogger another path."
            ) from error


def _plain(value: Any) -> Any:
    """Puts strings where JSON has no number."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
