"""Triggers: when an interval has passed, decided alike on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable

from paraflow.interval import Interval

Agree = Callable[[float], float]
"""Gives rank 0's number to every rank; a collective."""


def _alone(value: float) -> float:
    return value


class Trigger:
    """Tells at each step, and at the end of each epoch, whether its interval has passed.

    Clocks differ from rank to rank, so for an interval of time rank 0 decides. To do so without a message a step, it
    also says at which step to ask again: when about half of the time that is left will have passed.

    Args:
        interval: How often.
        agree: Gives rank 0's number to every rank.

    Example:
        >>> trigger = Trigger(Interval.parse(3))
        >>> [step for step in range(1, 8) if trigger.at_step(step)]
        [3, 6]
    """

    def __init__(self, interval: Interval, agree: Agree = _alone) -> None:
        self.interval = interval
        self._agree = agree
        self._since = time.monotonic()
        self._since_step = 0
        self._ask_at = 0

    def start(self, step: int) -> None:
        """Begins to count time, at a step."""
        self._since = time.monotonic()
        self._since_step = step
        self._ask_at = step + 1

    def at_step(self, step: int) -> bool:
        """Whether the interval has passed with this step."""
        if self.interval.unit == "st":
            return step % self.interval.amount == 0
        return self.interval.unit == "s" and step >= self._ask_at and self._has_passed(step)

    def at_epoch(self, epoch: int) -> bool:
        """Whether the interval has passed with the end of this epoch, the first being 1."""
        return self.interval.unit == "ep" and epoch % self.interval.amount == 0

    def _has_passed(self, step: int) -> bool:
        elapsed = time.monotonic() - self._since
        passed = elapsed >= self.interval.amount
        left = self.interval.amount if passed else self.interval.amount - elapsed
        steps_per_second = max(step - self._since_step, 1) / max(elapsed, 1e-9)
        wait = max(1, int(left * steps_per_second / 2))
        answer = int(self._agree(float(-wait if passed else wait)))
        self._ask_at = step + abs(answer)
        if answer < 0:
            self._since, self._since_step = time.monotonic(), step
        return answer < 0
