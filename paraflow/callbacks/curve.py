"""Draws one curve to a file, with a point of it marked."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paraflow.errors import ParaflowError


@dataclass(frozen=True)
class Curve:
    """A curve over a logarithmic axis.

    Attributes:
        x: The places, all above 0.
        y: The values, as many.
        xlabel: What the places are.
        ylabel: What the values are.
        base: The base of the axis of places: 10, or 2 for sizes that double.
        faint: The places and values of a curve that is drawn faintly behind, such as that which was smoothed, or None.
        marked: The place that is marked, one of ``x``, or None.
        label: What is written beside the mark.
        top: Where the picture ends above, where what lies higher would flatten the rest; None for all of it.

    Raises:
        ValueError: There are not as many values as places.
    """

    x: Sequence[float]
    y: Sequence[float]
    xlabel: str
    ylabel: str
    base: int = 10
    faint: tuple[Sequence[float], Sequence[float]] | None = None
    marked: float | None = None
    label: str = ""
    top: float | None = None

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"A curve has a value a place, not {len(self.y)} for {len(self.x)}.")

    def draw(self, path: str | Path) -> Path:
        """Draws it to a PNG, or whatever the suffix says; the folder is made.

        Raises:
            ParaflowError: matplotlib is not installed.
        """
        require_matplotlib("Drawing a curve")
        from matplotlib.figure import Figure

        # A figure without pyplot: whatever backend the user has chosen stays as it is.
        figure = Figure(figsize=(5.6, 3.8), layout="constrained")
        axis = figure.subplots()
        if self.faint is not None:
            axis.plot(*self.faint, color="tab:blue", alpha=0.3, linewidth=1, label="measured")
        marker: dict[str, Any] = {"marker": "o", "markersize": 4} if len(self.x) <= 40 and self.faint is None else {}
        axis.plot(self.x, self.y, color="tab:blue", label=None if self.faint is None else "smoothed", **marker)
        if self.marked is not None:
            value = self.y[list(self.x).index(self.marked)]
            axis.axvline(self.marked, color="tab:red", linestyle=":", linewidth=1)
            axis.plot([self.marked], [value], "o", color="tab:red", label=self.label)
        axis.set_xscale("log", base=self.base)
        axis.set(xlabel=self.xlabel, ylabel=self.ylabel)
        if self.top is not None:
            lowest = min(value for value in (*self.y, *(self.faint or ((), ()))[1]) if math.isfinite(value))
            axis.set_ylim(lowest - 0.05 * (self.top - lowest), self.top)
        axis.grid(alpha=0.3)
        if self.base == 2 and self.x:
            axis.set_xticks(list(self.x), [f"{place:g}" for place in self.x], rotation=45 if len(self.x) > 10 else 0)
        if self.faint is not None or self.marked is not None:
            axis.legend(frameon=False)
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=120)
        return target


def require_matplotlib(who: str) -> None:
    """Refuses to draw where there is nothing to draw with, before anything has been measured.

    Raises:
        ParaflowError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ParaflowError(f"{who} needs matplotlib: pip install 'paraflow[plot]'.")
