"""When a run ends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Epochs and optimizer steps; the first to be reached ends the run.

    Attributes:
        epochs: Epochs, or None.
        steps: Optimizer steps, or None.

    Raises:
        ValueError: One is not a whole number of at least 1.

    Example:
        >>> Limits.of(None, None)
        Limits(epochs=1, steps=None)
        >>> Limits(epochs=3, steps=100).total_steps(steps_per_epoch=20)
        60
    """

    epochs: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("max_epochs", self.epochs), ("max_steps", self.steps)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}.")

    @classmethod
    def of(cls, epochs: int | None, steps: int | None) -> Limits:
        """Returns the limits that were given, or one epoch where neither was."""
        return cls(1, None) if epochs is None and steps is None else cls(epochs, steps)

    def total_steps(self, steps_per_epoch: int | None) -> int | None:
        """Returns the steps of the whole run, or None where the data does not say."""
        by_epochs = self.epochs * steps_per_epoch if self.epochs and steps_per_epoch else None
        return min((limit for limit in (by_epochs, self.steps) if limit is not None), default=None)

    def reached(self, epochs: int, steps: int) -> bool:
        """Whether so many complete epochs and steps are all there should be."""
        return (self.epochs is not None and epochs >= self.epochs) or (self.steps is not None and steps >= self.steps)
