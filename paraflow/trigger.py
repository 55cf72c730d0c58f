"""Triggers: when an interval has passed, decided alike on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable

from paraflow.interval import Interval

Agree = Callable[[float], float]
"""Gives rank 0's number to every rank; a collective."""

_AHEAD_SECONDS = 1.0


class Trigger:
    """Tells at each step, and at the end of each epoch, whether its interval has passed.

    Clocks differ from rank to rank, so for an interval of time rank 0 decides. To do so without a message a step, it
    also says at which step to ask again: when half of the time that is left will have passed at the present pace, but
    no more than a second ahead, so that a run that slows down is not late by much more than that. One process looks at
    its clock at each step.

    Args:
        interval: How often.
        agree: Gives rank 0's number to every rank; None where there is one process.

    Example:
        >>> trigger = Trigger(Interval.parse(3))
        >>> [step for step in range(1, 8) if trigger.at_step(step)]
        [3, 6]
    """

    def __init__(self, interval: Interval, agree: Agree | None = None) -> None:
        self.interval = interval
        self._agree = agree
        self._since = time.monotonic()
        self._looked = 0, self._since
        self._ask_at = 0

    def start(self, step: int) -> None:
        """Begins to count time, at a step."""
        self._since = time.monotonic()
        self._looked = step, self._since
        self._ask_at = step + 1

    def at_step(self, step: int) -> bool:
        """Whether the interval has passed with this step."""
        if self.interval.unit == "st":
            return step % self.interval.amount == 0
        return self.interval.unit == "s" and step >= self._ask_at and self._has_passed(step)

    def ask_soon(self) -> None:
        """Has the clock looked at with the next step: something has happened that was no step."""
        self._ask_at = 0

    def at_epoch(self, epoch: int) -> bool:
        """Whether the interval has passed with the end of this epoch, the first being 1."""
        return self.interval.unit == "ep" and epoch % self.interval.amount == 0

    def _has_passed(self, step: int) -> bool:
        now = time.monotonic()
        elapsed = now - self._since
        passed = elapsed >= self.interval.amount
        if self._agree is not None:
            left = self.interval.amount if passed else self.interval.amount - elapsed
            # The pace since the last look: the average of hours would not see that steps have become slow.
            pace = max(step - self._looked[0], 1) / max(now - self._looked[1], 1e-9)
            wait = max(1, int(min(left / 2, _AHEAD_SECONDS) * pace))
            answer = int(self._agree(float(-wait if passed else wait)))
            passed, self._ask_at = answer < 0, step + abs(answer)
            self._looked = step, now
        if passed:
            self._since = now
        return passed
