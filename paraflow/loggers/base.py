"""What all loggers share: the numbers of a run under the same names, written by rank 0."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from paraflow.callbacks.base import Callback
from paraflow.errors import ParaflowError
from paraflow.interval import Interval

if TYPE_CHECKING:
    from paraflow.trainer import Trainer

Event = Literal["step", "validation", "epoch"]

_NEVER = Interval(math.inf, "st")  # no step is a multiple of it
_RESERVED = ("event", "step", "epoch", "time")


class Logger(Callback):
    """The base of loggers: decides what is written and when, and leaves the writing to three methods.

    The axis is always ``trainer.step``, one counter for training and validation, and names are the same in every log:
    a step's numbers as they are called in its logs (``loss``, ``lr``, ``grad_norm``), an epoch's under ``epoch_``
    (``epoch_loss``), those of validation under ``val_`` (``val_loss``). Validation that ends with an epoch is written
    with it, any other when it is done. What `Trainer.evaluate` measures outside of a fit is not written.

    Whatever `float` takes is written; anything else is left out, with one warning a name. Only rank 0 reads the
    numbers and calls `begin`, `write` and `end`; a `begin` that fails is raised on every rank.

    Args:
        every: How often a step is logged; None for epochs and validation only.

    Example:
        >>> class Printer(Logger):
        ...     def write(self, event, step, epoch, numbers):
        ...         print(event, step, sorted(numbers))
        >>> Printer(every=None).every
        Interval(amount=inf, unit='st')
    """

    def __init__(self, every: Interval | str | int | None = 50) -> None:
        self.every = _NEVER if every is None else Interval.parse(every)
        self._running = False
        self._validation_written = -1
        self._warned: set[str] = set()

    def begin(self, trainer: Trainer) -> None:
        """Opens the log; where ``trainer.step`` is above 0, the run is resumed and goes on with it from there."""

    def write(self, event: Event, step: int, epoch: int, numbers: dict[str, float]) -> None:
        """Writes numbers; they are safe from the death of this process when it returns, where the log allows.

        Args:
            event: What the numbers are of.
            step: Optimizer steps that are done.
            epoch: The epoch that runs or has just ended, from 1.
            numbers: By name.
        """
        raise NotImplementedError(f"{type(self).__name__} must define write(event, step, epoch, numbers).")

    def end(self, step: int, error: BaseException | None) -> None:
        """Closes the log, as finished, or where there is an error as failed."""

    def on_train_begin(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Opens the log: a collective, so that no rank waits for one that could not open it."""
        self._running, self._validation_written, self._warned = False, -1, set()
        failure: Exception | None = None
        if trainer.is_main:
            try:
                self.begin(trainer)
            except Exception as error:
                failure = error
        failed = trainer.mesh.broadcast(float(failure is not None))
        if failure is not None:
            raise failure
        if failed:
            raise ParaflowError(f"{type(self).__name__} could not begin on rank 0, which says why.")
        self._running = trainer.is_main

    def on_step_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Writes the step's numbers."""
        self._write("step", trainer, logs)

    def on_validation_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Writes the results, unless the epoch's numbers are about to come with them."""
        if self._running and not (trainer.epoch_complete or trainer.finishing):
            self._write("validation", trainer, logs)
            self._validation_written = trainer.step

    def on_epoch_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Writes the epoch's means and the validation that came with it."""
        if self._validation_written == trainer.step:  # the run was stopped by what validation gave
            logs = {name: value for name, value in logs.items() if not name.startswith("val_")}
        self._write("epoch", trainer, logs)

    def on_train_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Closes the log as finished."""
        if self._running:
            self._running = False
            self.end(trainer.step, None)

    def on_exception(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Closes the log as failed."""
        if self._running:
            self._running = False
            try:
                self.end(trainer.step, logs["exception"])
            except Exception as error:  # what was raised first is what the user must see
                warnings.warn(f"{type(self).__name__} could not close its log: {error}", stacklevel=2)

    def _write(self, event: Event, trainer: Trainer, logs: Mapping[str, Any]) -> None:
        if self._running:
            prefix = "epoch_" if event == "epoch" else ""
            numbers = {name if name.startswith("val_") else prefix + name: value for name, value in logs.items()}
            self.write(event, trainer.step, trainer.current_epoch + 1, self._as_floats(numbers))

    def _as_floats(self, numbers: Mapping[str, Any]) -> dict[str, float]:
        floats = {}
        for name, value in numbers.items():
            try:
                if name in _RESERVED:
                    raise ValueError("the log has a column of its own by that name")
                if isinstance(value, torch.Tensor) and value.numel() != 1:
                    raise ValueError(f"a tensor of shape {tuple(value.shape)} is no number")
                floats[name] = float(value)
            except (TypeError, ValueError, OverflowError) as error:
                self.warn_once(name, f"{type(self).__name__} leaves out {name!r}: {error}.")
        return floats

    def warn_once(self, key: str, text: str) -> None:
        """Warns, once a fit for each key."""
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(text, stacklevel=2)
