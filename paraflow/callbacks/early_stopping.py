"""Stops a run whose monitored metric no longer gets better."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from paraflow.callbacks.base import Callback
from paraflow.callbacks.best_weights import average_of, measured_weights, read_weights, require_one_at_the_end
from paraflow.callbacks.monitor import Mode, Monitor
from paraflow.callbacks.trial import say

if TYPE_CHECKING:
    import torch

    from paraflow.trainer import Trainer


class EarlyStopping(Callback):
    """Stops after `patience` measurements without a better one.

    Each measurement counts once: of validation whenever it is due, of training at an epoch's end. What is measured only
    because the run ends there does not count against patience, so a resumed run decides as one that never stopped.

    Args:
        monitor: The metric, such as ``"val_loss"`` or ``"loss"``.
        mode: Whether the best is the ``"min"`` or the ``"max"``; needed where the metric's name does not tell.
        patience: Measurements in a row without a better one that end the run.
        min_delta: By how much a value must be better to count as better. One that is not a number never is.
        warmup: How many of the first measurements do not count against patience.
        target: A value at which, or beyond which, the run ends at once.
        stop_on_nan: Whether a value that is NaN or infinite ends the run at once.
        restore_best: Whether the best weights (an `EMA`'s averages, where validation is of these) are put back when the
            run ends. Each rank keeps a copy in the host's memory, and checkpoints hold it.

    Attributes:
        best, best_step: The best value so far, and its step, or None.
        wait: Measurements since then that count against patience.
        stopped_step: The step at which it stopped the run, or None; such a run, resumed, stops again.

    Raises:
        ValueError: An argument is not of its kind.
    """

    loads_from_disk = True

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        mode: Mode | None = None,
        patience: int = 3,
        min_delta: float = 0.0,
        warmup: int = 0,
        target: float | None = None,
        stop_on_nan: bool = False,
        restore_best: bool = False,
    ) -> None:
        for name, number, least in (("patience", patience, 1), ("warmup", warmup, 0)):
            if not isinstance(number, int) or isinstance(number, bool) or number < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, not {number!r}.")
        self.monitor = Monitor.of(monitor, mode, min_delta)
        self.patience, self.warmup, self.target = patience, warmup, target
        self.stop_on_nan, self.restore_best, self._fitting = stop_on_nan, restore_best, False
        self._reset()

    def _reset(self) -> None:
        self.best: float | None = None
        self.best_step: int | None = None
        self.wait = 0
        self.stopped_step: int | None = None
        self._measured: list[float] = [0, math.inf]  # how often, and the last value
        self._weights: dict[str, torch.Tensor] = {}

    def on_train_begin(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Begins anew, or goes on; a resumed run that had stopped stops again."""
        if not trainer.step:
            self._reset()
        self.monitor.require_data(trainer, "EarlyStopping")
        if self.restore_best:
            require_one_at_the_end(trainer)
            self._weights = read_weights(trainer, self._weights)
        self._fitting, self._looked_at, self._last = True, trainer.step, math.nan
        self.stopped_step = self.stopped_step if self._reason() else None
        if self.stopped_step is not None:
            trainer.stop()

    def on_validation_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Looks at a validation that was due within an epoch; a callback's `Trainer.evaluate` is none."""
        if self._fitting and trainer.run.val_trigger.interval.unit != "ep" and self.monitor.is_due(trainer):
            self._look(trainer, logs.get(self.monitor.name))

    def on_epoch_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Looks at what the epoch and its validation measured."""
        value = self.monitor.value(trainer)
        if self.monitor.is_due(trainer):
            self._look(trainer, value)
        elif value is not None and trainer.step != self._looked_at:
            self._last = value

    def _look(self, trainer: Trainer, value: float | None) -> None:
        if value is None or trainer.step == self._looked_at:
            return
        self._looked_at, self._measured = trainer.step, [self._measured[0] + 1, float(value)]
        if self.monitor.is_better(value, than=self.best):
            self.best, self.best_step, self.wait = float(value), trainer.step, 0
            self._weights = measured_weights(trainer, self.monitor.name) if self.restore_best else {}
        elif self._measured[0] > self.warmup:
            self.wait += 1
        if self._reason():
            self.stopped_step = trainer.step
            trainer.stop()

    def _reason(self) -> str:
        """Why the run should end, or nothing."""
        (count, value), name = self._measured, self.monitor.name
        if count and self.stop_on_nan and not math.isfinite(value):
            return f"{name} is {value}"
        sign = 1 if self.monitor.mode == "min" else -1
        if count and self.target is not None and sign * value <= sign * self.target:
            return f"{name} has reached {value:.4g}"
        best = "a number" if self.best is None else f"better than {self.best:.4g} of step {self.best_step}"
        return f"{name} was not {best} in {self.wait} measurements" if self.wait >= self.patience else ""

    def on_train_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Puts back the best weights, and says why the run was stopped: rank 0 prints."""
        self._fitting = False
        ended = [] if self.stopped_step is None else [f"stopped at step {self.stopped_step}: {self._reason()}"]
        if said := ended + (self._put_back(trainer) if self._weights else []):
            say(trainer, "; ".join(said))

    def _put_back(self, trainer: Trainer) -> list[str]:
        """Puts the best weights in the model: those of the run's end, if what was measured there is better."""
        name, last = self.monitor.name, self.monitor.is_better(self._last, than=self.best)
        weights, step = (measured_weights(trainer, name), trainer.step) if last else (self._weights, self.best_step)
        if step == trainer.step and average_of(trainer, name) is None:
            return []  # they are there
        trainer.engine.load_model_state(weights)
        return [f"the weights of step {step} are back"]

    def state_dict(self) -> dict[str, Any]:
        """Returns the best, how long ago it was, what was measured last, and with `restore_best` the best weights."""
        best = {"best": self.best, "best_step": self.best_step, "weights": self._weights}
        return {**best, "wait": self.wait, "stopped_step": self.stopped_step, "measured": self._measured}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes them up."""
        self.best, self.best_step, self.wait = state["best"], state["best_step"], state["wait"]
        self.stopped_step, self._measured = state["stopped_step"], list(state["measured"])
        self._weights = dict(state["weights"]) if self.restore_best else {}
