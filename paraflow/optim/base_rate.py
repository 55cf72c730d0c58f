"""The base learning rate of an optimizer and its schedule: what a schedule's factors multiply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_OF_GROUP = ("lr", "initial_lr", "max_lr", "min_lr")
_OF_SCHEDULE = ("base_lrs", "max_lrs", "_last_lr")


def base_rates(optimizer: Optimizer) -> list[float]:
    """Returns each group's base rate: the peak of torch's OneCycleLR, the initial rate of other schedules, or its own.

    Example:
        >>> base_rates(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5))
        [0.5]
    """
    return [float(group.get("max_lr", group.get("initial_lr", group["lr"]))) for group in optimizer.param_groups]


def ratios(optimizer: Optimizer) -> list[float]:
    """Returns each group's base rate as a multiple of the first group's; all 1 where that is zero."""
    bases = base_rates(optimizer)
    return [base / bases[0] for base in bases] if bases[0] else [1.0] * len(bases)


def set_rates(optimizer: Optimizer, rates: Sequence[float]) -> None:
    """Sets each group's rate for the next step."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        _put(group, "lr", rate)


def set_base_rate(optimizer: Optimizer, schedule: LRScheduler | None, rate: float) -> None:
    """Makes a rate the base of the first group, and of the others by their ratios; a schedule goes on from it.

    Args:
        optimizer: Its groups' rates, present and initial, are changed.
        schedule: The schedule, in any of torch's kinds; of one with a lower bound of its own, that stays.
        rate: The base rate of the first group.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
        >>> schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 2))
        >>> set_base_rate(optimizer, schedule, 3.0)
        >>> optimizer.param_groups[0]["lr"], schedule.base_lrs
        (1.5, [3.0])
    """
    olds = base_rates(optimizer)
    news = [rate * ratio for ratio in ratios(optimizer)]
    for group, old, new in zip(optimizer.param_groups, olds, news, strict=True):
        for key in _OF_GROUP:
            if key in group:
                _put(group, key, _scaled(float(group[key]), old, new))
    if schedule is not None:
        _scale_schedule(schedule, olds, news)


def _scale_schedule(schedule: LRScheduler, olds: list[float], news: list[float]) -> None:
    for key in _OF_SCHEDULE:
        values = getattr(schedule, key, None)
        if isinstance(values, list):
            setattr(
                schedule, key, [_scaled(float(v), old, new) for v, old, new in zip(values, olds, news, strict=True)]
            )
    for part in getattr(schedule, "_schedulers", ()):
        _scale_schedule(part, olds, news)


def _scaled(value: float, old: float, new: float) -> float:
    """A rate that was some multiple of the old base, as that multiple of the new one."""
    return value / old * new if old else new


def _put(group: dict[str, Any], key: str, value: float) -> None:
    if isinstance(group[key], torch.Tensor):  # a rate on the device, which compiled optimizers read
        group[key].fill_(value)
    else:
        group[key] = value
