"""Which of a run's checkpoints stay: the last ones, and the best."""

from __future__ import annotations

import math
from typing import Any


class Retention:
    """The checkpoints a run has saved, by step.

    Args:
        keep: How many of the last stay.
        keep_best: How many of the best stay.
        greatest: Whether the greatest value is the best.

    Attributes:
        saved: The steps that are on the disk, or being written, in order of time.

    Example:
        >>> retention = Retention(keep=1, keep_best=1)
        >>> retention.add(10, 0.5), retention.add(20, 0.7), retention.add(30, 0.6)
        (None, None, None)
        >>> retention.unneeded(), retention.bests()
        ([20], [(0.5, 10)])

    Raises:
        ValueError: The last, or the best, would not stay.
    """

    def __init__(self, keep: int = 1, keep_best: int = 1, *, greatest: bool = False) -> None:
        for name, value in (("keep", keep), ("keep_best", keep_best)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"{name} must be a whole number of at least 1, not {value!r}: the last checkpoint and the best "
                    "always stay."
                )
        self.saved: list[int] = []
        self._keep, self._keep_best, self._sign = keep, keep_best, -1.0 if greatest else 1.0
        self._values: dict[int, float] = {}

    def reset(self) -> None:
        """Forgets everything."""
        self.saved, self._values = [], {}

    def add(self, step: int, value: float | None) -> None:
        """Notes a checkpoint, and what the metric was at its step; None or NaN is never the best."""
        self.saved = [*(saved for saved in self.saved if saved != step), step]
        self._values.pop(step, None)
        if value is not None and not math.isnan(value):
            self._values[step] = value

    def bests(self) -> list[tuple[float, int]]:
        """Returns the best values with their steps, the best first; of equals, the first."""
        values = [(self._values[step], step) for step in self.saved if step in self._values]
        return sorted(values, key=lambda pair: (self._sign * pair[0], pair[1]))[: self._keep_best]

    def unneeded(self) -> list[int]:
        """Returns the steps whose checkpoints need not stay."""
        needed = {*self.saved[-self._keep :], *(step for _, step in self.bests())}
        return [step for step in self.saved if step not in needed]

    def drop(self, steps: list[int]) -> None:
        """Forgets checkpoints that are gone."""
        self.saved = [step for step in self.saved if step not in steps]
        self._values = {step: value for step, value in self._values.items() if step not in steps}

    def state_dict(self) -> dict[str, Any]:
        """Returns the steps that were saved, what was measured at them, and the best of them."""
        bests = self.bests()
        return {"saved": list(self.saved), "values": dict(self._values), "best_step": bests[0][1] if bests else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes them up."""
        self.saved = list(state["saved"])
        self._values = {step: value for step, value in state["values"].items() if step in self.saved}
