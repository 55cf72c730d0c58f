"""What a callback watches: a metric by name, and which of two values is the better."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paraflow.errors import ParaflowError

if TYPE_CHECKING:
    from paraflow.trainer import Trainer

Mode = Literal["min", "max"]
_GREATER = """acc accuracy auroc auc aupr ap map f1 fbeta precision recall specificity sensitivity r2 iou miou dice
    bleu rouge meteor psnr ssim mcc kappa ndcg mrr hit hits top1 top5 correct reward"""
_LESS = """loss error err mae mse rmse mape l1 l2 nll bce ce perplexity ppl bits bpb bpc wer cer ter fid kid kl distance
    regret norm"""
_GREATER_IS_BETTER, _LESS_IS_BETTER = frozenset(_GREATER.split()), frozenset(_LESS.split())


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
        """Returns a monitor; where no mode is said, the words of the name tell: losses are best low, accuracies high.

        Raises:
            ValueError: An argument is not of its kind, or the name tells nothing.
        """
        if mode not in (None, "min", "max"):
            raise ValueError(f"mode must be 'min' or 'max', not {mode!r}.")
        if min_delta < 0:
            raise ValueError(f"min_delta must be at least 0, not {min_delta!r}.")
        return cls(name, mode or _mode_of(name), min_delta)

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

    def is_due(self, trainer: Trainer) -> bool:
        """Whether a run that went on would have measured here as well."""
        trigger = trainer.run.val_trigger
        if not self.name.startswith("val_"):
            return trainer.epoch_complete
        if trigger.interval.unit == "s":
            return not trainer.finishing
        return trigger.at_step(trainer.step) or (trainer.epoch_complete and trigger.at_epoch(trainer.epoch))

    def require_data(self, trainer: Trainer, who: str) -> None:
        """Refuses to watch validation in a run that has none.

        Raises:
            ParaflowError: There is no validation data.
        """
        if self.name.startswith("val_") and not trainer.validates:
            raise ParaflowError(f"{who} monitors {self.name!r}, and fit was given no validation data.")


def _mode_of(name: str) -> Mode:
    words = set(name.lower().replace("-", "_").replace("/", "_").split("_"))
    greater, less = words & _GREATER_IS_BETTER, words & _LESS_IS_BETTER
    if bool(greater) == bool(less):
        raise ValueError(f"Whether {name!r} is best high or low is not in its name; write mode='max' or mode='min'.")
    return "max" if greater else "min"
