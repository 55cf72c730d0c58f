"""Ends a run when its time is over."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from paraflow.callbacks.base import Callback
from paraflow.interval import Interval

if TYPE_CHECKING:
    from paraflow.trainer import Trainer

_SECONDS = {"d": 86400.0, "h": 3600.0, "min": 60.0, "sec": 1.0, "s": 1.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(d|h|min|sec|s)\s*", re.IGNORECASE)
_AT_ONCE = 1e-9


class TimeLimit(Callback):
    """Asks the run to end with the first step after so much time, the same step on every rank: rank 0's clock decides.

    One process looks at its clock at each step; several look about a second ahead at most, at the pace of the steps
    before. What ends with a run comes after it: the last validation and the last checkpoint. Leave time for all of it.

    Args:
        limit: ``"11h30min"``, ``"90s"``, ``"1d 12h"`` (of d, h, min, s), a number of seconds, a `datetime.timedelta`,
            or an `Interval` of time. It begins with the first step, not with the program.
        over_resumes: Whether a resumed run has only the time that its earlier parts left over.

    Attributes:
        seconds: The limit.
        stopped_step: The step at which the run was asked to end, or None.

    Raises:
        ValueError: The limit is no time, or not above zero.

    Example:
        >>> TimeLimit("11h30min").seconds
        41400.0
        >>> TimeLimit("500st")
        Traceback (most recent call last):
        ValueError: TimeLimit takes time, not '500st': write "11h30min", 41400 for seconds, or a timedelta; ...
    """

    def __init__(self, limit: Interval | str | float | timedelta, *, over_resumes: bool = False) -> None:
        self.seconds = _seconds_of(limit)
        self.over_resumes = over_resumes
        self.stopped_step: int | None = None
        # The loop asks at this interval, by rank 0's clock and without a message a step: its first time is the limit.
        self.every = Interval(self.seconds, "s")
        self._spent = 0.0
        self._began: float | None = None

    def on_train_begin(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Begins to count; a resumed run that has no time left is asked to end."""
        self._began, self.stopped_step = time.monotonic(), None
        self._spent = self._spent if trainer.step else 0.0
        self.every = Interval(self.seconds, "s")  # what load_state_dict left of it holds for this run only
        if self.over_resumes and self._spent >= self.seconds:
            self.on_step_end(trainer, logs)

    def on_step_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Asks the run to end."""
        if self.stopped_step is None:
            self.stopped_step = trainer.step
        trainer.stop()

    def on_train_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Says why the run ended: rank 0 prints."""
        self._spent, self._began = self._time_spent(), None
        if self.stopped_step is not None and trainer.progress and trainer.is_main:
            limit = timedelta(seconds=self.seconds)
            trainer.console.print(
                f"stopped at step {self.stopped_step}: the time limit of {limit} has passed",
                highlight=False,
                soft_wrap=True,
            )

    def _time_spent(self) -> float:
        return self._spent + (0.0 if self._began is None else time.monotonic() - self._began)

    def state_dict(self) -> dict[str, Any]:
        """Returns the seconds that the run has taken so far, earlier parts included."""
        return {"seconds": self._time_spent()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes them up."""
        self._spent = float(state["seconds"])
        if self.over_resumes:
            self.every = Interval(max(self.seconds - self._spent, _AT_ONCE), "s")


def _seconds_of(limit: Interval | str | float | timedelta) -> float:
    seconds: float | None = None
    if isinstance(limit, timedelta):
        seconds = limit.total_seconds()
    elif isinstance(limit, Interval):
        seconds = limit.amount if limit.unit == "s" else None
    elif isinstance(limit, (int, float)) and not isinstance(limit, bool):
        seconds = float(limit)
    elif isinstance(limit, str) and _PART.sub("", limit.strip()) == "":
        seconds = sum(float(part[1]) * _SECONDS[part[2].lower()] for part in _PART.finditer(limit))
    if seconds is None or not 0 < seconds < float("inf"):
        raise ValueError(
            f'TimeLimit takes time, not {limit!r}: write "11h30min", 41400 for seconds, or a timedelta; for steps and '
            "epochs there is Trainer(max_steps=..., max_epochs=...)."
        )
    return seconds
