"""Intervals of training: every argument that says "how often" takes an `Interval`, or what parses to one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Unit = Literal["ep", "st", "s"]

_SECONDS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}
_PATTERN = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*$", re.IGNORECASE)


@dataclass(frozen=True)
class Interval:
    """So many epochs, steps (optimizer steps) or seconds.

    Attributes:
        amount: How many; a whole number for epochs and steps.
        unit: ``"ep"`` epochs, ``"st"`` steps, ``"s"`` seconds.

    Example:
        >>> Interval.parse("10ep")
        Interval(amount=10, unit='ep')
        >>> Interval.parse(500), str(Interval.parse("1h"))
        (Interval(amount=500, unit='st'), '3600s')
        >>> Interval.parse("often")
        Traceback (most recent call last):
        ValueError: 'often' is no interval; write 500 or "500st" for steps, "10ep" for epochs, "30s", "5min" or "1h" ...
    """

    amount: float
    unit: Unit

    @classmethod
    def parse(cls, value: Interval | str | int) -> Interval:
        """Reads an interval.

        Args:
            value: An interval, a whole number of steps, or a number with its unit: ep, st, s, sec, min, h.

        Raises:
            ValueError: The value is none of these, or not above zero.
        """
        if isinstance(value, Interval):
            return value
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return cls(value, "st")
        match = _PATTERN.match(value) if isinstance(value, str) else None
        parsed = cls._from_parts(float(match[1]), match[2].lower()) if match else None
        if parsed is None:
            raise ValueError(
                f'{value!r} is no interval; write 500 or "500st" for steps, "10ep" for epochs, '
                '"30s", "5min" or "1h" for time, each above zero.'
            )
        return parsed

    @classmethod
    def _from_parts(cls, amount: float, unit: str) -> Interval | None:
        if amount <= 0:
            return None
        if unit in _SECONDS:
            return cls(amount * _SECONDS[unit], "s")
        if unit not in ("ep", "st") or amount != int(amount):
            return None
        return cls(int(amount), "ep" if unit == "ep" else "st")

    @property
    def seconds(self) -> float:
        """The seconds of an interval of time.

        Raises:
            ValueError: It is one of steps or epochs.
        """
        if self.unit != "s":
            raise ValueError(f"{str(self)!r} is no time; write a time such as '30s', '10min' or '2h'.")
        return self.amount

    def __str__(self) -> str:
        return f"{self.amount:g}{self.unit}"
