"""The learning-rate range test in numbers: rates, smoothing, and where a curve falls most steeply.

The test is that of L. N. Smith, "Cyclical Learning Rates for Training Neural Networks" (2017), with rates that rise
exponentially.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_FORGET = 0.9  # of the average, a step: a window of about ten steps
_FEWEST = 5  # steps of a curve that has a shape
_LEFT_OUT = 10  # one part of so many of the curve's beginning: the average has not settled there
_LEAST_DESCENT = 0.01  # of the loss at the beginning; less is noise


def rates(low: float, high: float, steps: int) -> list[float]:
    """Returns learning rates from low to high, each the same multiple of the one before.

    Example:
        >>> [round(rate, 6) for rate in rates(0.001, 10, 5)]
        [0.001, 0.01, 0.1, 1.0, 10.0]
    """
    return [low * (high / low) ** (step / (steps - 1)) for step in range(steps)]


class Smoothed:
    """An exponential average, corrected for its beginning: the first value is the first number itself.

    Example:
        >>> average = Smoothed()
        >>> average.add(2.0), round(average.add(4.0), 6)  # (0.09 · 2 + 0.1 · 4) / 0.19
        (2.0, 3.052632)
    """

    def __init__(self) -> None:
        self._average = 0.0
        self._weight = 0.0

    def add(self, value: float) -> float:
        """Adds a number, and returns the average of all so far."""
        self._average = _FORGET * self._average + (1 - _FORGET) * value
        self._weight = _FORGET * self._weight + (1 - _FORGET)
        return self._average / self._weight


def has_diverged(losses: Sequence[float], factor: float) -> bool:
    """Whether the last of the smoothed losses is above so many times the best, or no number.

    A loss may be negative; it has diverged where it lies above the best by so many times its size, less one.
    """
    last = losses[-1]
    if not math.isfinite(last):
        return True
    best = min(losses)
    return len(losses) > 1 and last - best > (factor - 1) * abs(best)


def steepest(rates: Sequence[float], losses: Sequence[float]) -> tuple[float | None, str]:
    """Returns the rate at which the smoothed loss falls most steeply over the logarithm of the rate.

    Only what comes before the least loss is looked at, without the beginning, where the average has not settled.

    Args:
        rates: The rates, rising.
        losses: The smoothed loss at each; what is not finite ends the curve.

    Returns:
        The rate, and an empty text; or None, and why there is none.
    """
    count = next((place for place, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    if count < _FEWEST:
        return None, f"the loss was finite for only {count} steps; begin lower"
    first, least = max(1, count // _LEFT_OUT), min(range(count), key=losses.__getitem__)
    if losses[0] - losses[least] <= _LEAST_DESCENT * abs(losses[0]):
        return None, "the loss never fell by more than a hundredth"
    if least <= first:
        return None, "the loss rose from the beginning; begin lower"
    slopes = {place: _slope(rates, losses, place) for place in range(first, least)}
    return rates[min(slopes, key=slopes.__getitem__)], ""


def _slope(rates: Sequence[float], losses: Sequence[float], place: int) -> float:
    return (losses[place + 1] - losses[place - 1]) / math.log(rates[place + 1] / rates[place - 1])
