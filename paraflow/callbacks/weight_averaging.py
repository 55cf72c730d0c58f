"""Stochastic weight averaging."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paraflow.callbacks.averages import Averages, load_averages
from paraflow.callbacks.base import Callback
from paraflow.callbacks.batch_norm import measure_batch_norm
from paraflow.callbacks.trial import say
from paraflow.errors import DataError, ParaflowError
from paraflow.interval import Interval
from paraflow.trigger import Trigger

if TYPE_CHECKING:
    from paraflow.trainer import Trainer


class StochasticWeightAveraging(Callback):
    """Averages the weights of the last part of a run with equal shares, and leaves the average in the model at its end.

    Source: Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization", 2018.

    Until the end, training, validation and checkpoints are of the raw weights; a checkpoint has the average apart, as
    this callback's state, and a resumed run goes on with it to the bit. At the end the average changes places with the
    weights, and the running statistics of batch normalisation are measured anew: one pass of forward over the training
    data in training mode, each rank over its share, see `paraflow.callbacks.batch_norm`. Then `Trainer.save` refuses;
    the run's last checkpoint has the raw weights, and `load` takes the average from it, with the raw statistics.

    Args:
        start: From which step on weights are averaged: an int, or a fraction of the run's steps.
        every: How often they are taken into the average.
        lr: A constant learning rate from the start on, for every parameter group; None leaves the schedule's.
        anneal: Steps over which the learning rate goes from what it was to `lr`, in a straight line.
        batch_norm: Whether statistics are measured anew; an int is the most batches that are read for it, which data
            without an end needs.

    Raises:
        ValueError: An argument is not of its kind.
    """

    loads_from_disk = True

    def __init__(
        self,
        start: float = 0.75,
        every: Interval | str | int = "1ep",
        lr: float | None = None,
        *,
        anneal: int = 0,
        batch_norm: bool | int = True,
    ) -> None:
        if isinstance(start, bool) or start < 0 or (isinstance(start, float) and start >= 1):
            raise ValueError(f"start must be a step, or a fraction of the run from 0 to below 1, not {start!r}.")
        if lr is not None and not lr > 0:
            raise ValueError(f"lr must be above 0, not {lr!r}.")
        self.start, self.lr, self.anneal, self.batch_norm = start, lr, anneal, batch_norm
        self._interval = Interval.parse(every)
        self._trigger = Trigger(self._interval)
        self._averages, self._first = Averages(buffers=False), 0
        self._lrs: list[float] = []

    def averaged(self) -> AbstractContextManager[None]:
        """Runs a block with the average of the weights so far in the model."""
        return self._averages.in_model()

    @staticmethod
    def load(model: nn.Module, path: str | Path, *, best: bool = False) -> None:
        """Gives a model on one device the averages of a checkpoint, or of the newest or best one in a folder."""
        load_averages(model, path, "StochasticWeightAveraging", best=best)

    def on_train_begin(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Finds the step at which averaging starts."""
        self._lrs = self._lrs if trainer.step else []
        if isinstance(self.start, float) and trainer.total_steps is None:
            raise ParaflowError(
                f"StochasticWeightAveraging(start={self.start}) is a fraction of the run, whose length the data does "
                "not say. Give a step, such as start=1000, or Trainer(max_steps=...)."
            )
        self._first = int(self.start * (trainer.total_steps or 0)) if isinstance(self.start, float) else self.start
        self._trigger = Trigger(self._interval, trainer.mesh.agree)
        self._trigger.start(trainer.step)
        self.bytes_held = self._averages.begin(trainer)

    def on_step_begin(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Sets the learning rate of the step, before anybody reads it."""
        past = trainer.step + 1 - self._first
        if self.lr is None or past < 1:
            return
        groups = trainer.engine.optimizer.param_groups
        self._lrs = self._lrs or [float(group["lr"]) for group in groups]
        share = min(1.0, past / self.anneal) if self.anneal else 1.0
        for group, before in zip(groups, self._lrs, strict=True):
            lr = before + (self.lr - before) * share if share < 1 else self.lr
            group["lr"] = torch.full_like(group["lr"], lr) if isinstance(group["lr"], torch.Tensor) else lr

    def on_after_optimizer_step(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Takes the weights into the average, where `every` is of steps or time."""
        if self._trigger.at_step(trainer.step + 1):
            self._take(trainer.step + 1)

    def on_epoch_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Takes the weights into the average, where `every` is of epochs."""
        if trainer.epoch_complete and self._trigger.at_epoch(trainer.epoch):
            self._take(trainer.step)

    def _take(self, step: int) -> None:
        if step >= self._first:
            self._averages.update(1 / (self._averages.count + 1))

    def on_train_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Leaves the average in the model."""
        self._averages.end()
        if not self._averages.count:
            warnings.warn("The run ended before StochasticWeightAveraging averaged any weights.", stacklevel=2)
            return
        self._averages.swap()
        said = f"averaged the weights of {self._averages.count} moments from step {self._first} on"
        said += self._measure(trainer) if self.batch_norm else ""
        say(trainer, said)

    def _measure(self, trainer: Trainer) -> str:
        try:
            layers, samples = measure_batch_norm(trainer, None if self.batch_norm is True else self.batch_norm)
        except DataError as error:  # such as an iterator that can be read once
            kept = "Batch normalisation keeps the raw weights' statistics, for the data could not be read again"
            warnings.warn(f"{kept}: {error}", stacklevel=2)
            return ""
        return f"; measured batch normalisation anew ({layers} layers, {samples} samples)" if layers else ""

    def on_exception(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Leaves the raw weights in the model."""
        self._averages.end()

    def state_dict(self) -> dict[str, Any]:
        """Returns the averages by full name, their count, and the learning rates before the start: a collective."""
        if self._averages.running and not self._averages.count:
            self._averages.follow()
        return {**self._averages.state_dict(), "lrs": list(self._lrs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes them up, now or when the run begins."""
        self._lrs = list(state["lrs"])
        self._averages.load_state_dict(state)
