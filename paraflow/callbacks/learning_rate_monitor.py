"""Adds the learning rates of all parameter groups to the numbers of a step."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from paraflow.callbacks.base import Callback
from paraflow.interval import Interval

if TYPE_CHECKING:
    from paraflow.trainer import Trainer


class LearningRateMonitor(Callback):
    """Adds ``lr/<group>`` for each of several parameter groups; of a single one ``lr`` is there already.

    A group is called by its ``name``, if its optimizer was given one, else by its place, from 0. The numbers are those
    the step was made with, not those the schedule has set for the next.

    Args:
        every: How often.
        momentum: Whether ``momentum``, or Adam's ``beta1`` and ``beta2``, are added as well.
        weight_decay: Whether ``weight_decay`` is.
    """

    def __init__(self, every: Interval | str | int = 1, *, momentum: bool = False, weight_decay: bool = False) -> None:
        self.every = every
        self._keys = ("lr", *(("momentum", "betas") if momentum else ()), *(("weight_decay",) if weight_decay else ()))
        self._groups: list[dict[str, Any]] = []

    def on_train_begin(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Reads what the first step will be made with."""
        self._read(trainer)

    def on_before_optimizer_step(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Reads what the step is made with: after it, the schedule has moved on."""
        self._read(trainer)

    def _read(self, trainer: Trainer) -> None:
        self._groups = [
            {key: _kept(group[key]) for key in ("name", *self._keys) if key in group}
            for group in trainer.engine.optimizer.param_groups
        ]

    def on_step_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Adds the numbers."""
        self._add(logs)

    def on_epoch_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Adds those of the epoch's last step."""
        self._add(logs)

    def _add(self, logs: dict[str, Any]) -> None:
        several = len(self._groups) > 1
        for group, name in zip(self._groups, self._names(), strict=True):
            for key, value in _numbers(group):
                if several:
                    logs[f"{key}/{name}"] = value
                elif key != "lr":
                    logs[key] = value

    def _names(self) -> list[str]:
        """A name for each group; one that several have is followed by the group's place."""
        names = [str(group.get("name", place)) for place, group in enumerate(self._groups)]
        times = Counter(names)
        return [name if times[name] == 1 else f"{name}-{place}" for place, name in enumerate(names)]


def _kept(value: Any) -> Any:
    """A learning rate may be a tensor that the schedule changes in place."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _numbers(group: dict[str, Any]) -> list[tuple[str, float]]:
    numbers = [(key, float(group[key])) for key in ("lr", "momentum", "weight_decay") if key in group]
    return numbers + [(f"beta{place}", float(beta)) for place, beta in enumerate(group.get("betas", ()), 1)]
