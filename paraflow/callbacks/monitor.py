"""What a callback watches: a metric by name, and which of two values is the better."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paraflow.errors import ParaflowError

if TYPE_CHECKING:
    from paraflow.trainer import Trainer

Mode = Literal["min", "max"]
_GREATER_IS_BETTER = ("acc", "auroc", "f1", "precision", "recall", "r2")


@dataclass(frozen=True)
class Monitor:
    """A metric that is watched.

    Attributes:
        name: The metric, such as ``"val_loss"``.
        mode: Whether the best is the ``"min"`` or the ``"max"``.
        min_delta: By how much a value must be better to count as better.

    Example:
        >>> monitor = Monitor.of("val_accuracy", None)
        >>> monitor.mode, monitor.is_better(0.9, than=0.8), monitor.is_better(float("nan"), than=0.8)
        ('max', True, False)
    """

    name: str
    mode: Mode
    min_delta: float = 0.0

    @classmethod
    def of(cls, name: str, mode: Mode | None, min_delta: float = 0.0) -> Monitor:
        """Returns a monitor; where no mode is said, accuracies and their like are best high, and all else low.

        Raises:
            ValueError: An argument is not of its kind.
        """
        if mode not in (None, "min", "max"):
            raise ValueError(f"mode must be 'min' or 'max', not {mode!r}.")
        if min_delta < 0:
            raise ValueError(f"min_delta must be at least 0, not {min_delta!r}.")
        return cls(name, mode or ("max" if any(mark in name for mark in _GREATER_IS_BETTER) else "min"), min_delta)

    def is_better(self, value: float, than: float | None) -> bool:
        """Whether a value is better than the best so far; one that is not a number never is."""
        if math.isnan(value):
            return False
        if than is None:
            return True
        return value < than - self.min_delta if self.mode == "min" else value > than + self.min_delta

    def value(self, trainer: Trainer) -> float | None:
        """Returns the value measured at the trainer's present step, or None where none was.

        Raises:
            ParaflowError: Nothing measures the metric, and what could have has run.
        """
        trainer.history.require(self.name, validates=trainer.validates and not trainer.finishing)
        return trainer.history.measured(self.name, trainer.step)

    def require_data(self, trainer: Trainer, who: str) -> None:
        """Refuses to watch validation in a run that has none.

        Raises:
            ParaflowError: There is no validation data.
        """
        if self.name.startswith("val_") and not trainer.validates:
            raise ParaflowError(f"{who} monitors {self.name!r}, and fit was given no validation data.")
