"""Learning-rate schedules by name, by function or ready-made."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from paraflow.errors import ModelError

ScheduleChoice = str | LRScheduler | Callable[[Optimizer], LRScheduler]


@dataclass(frozen=True)
class Schedule:
    """The factor on the learning rate at each step; call it with the step, from 0.

    The factor rises linearly over the warmup, from 1 / (warmup + 1) at step 0 (so that no step is wasted on a rate of
    zero) to 1 at step `warmup`, and then follows the shape. From `total` on it stays at its last value.

    Attributes:
        name: The shape: a key of `SHAPES`.
        warmup: Steps of warmup.
        total: Steps of the whole run; None where the shape has no end.

    Example:
        >>> schedule = Schedule("linear", warmup=1, total=5)
        >>> [schedule.factor(step) for step in range(7)]
        [0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """

    name: str
    warmup: int = 0
    total: int | None = None

    def factor(self, step: int) -> float:
        """The factor on the learning rate at `step`."""
        if self.name == "one_cycle":
            return _one_cycle(step, self.warmup, self.total or 1)
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        return SHAPES[self.name](step, self.warmup, self.total or 0)


def build_schedule(
    choice: ScheduleChoice | None, optimizer: Optimizer, *, total_steps: int | None, warmup: int | float = 0
) -> LRScheduler | None:
    """Make the learning-rate schedule of an optimizer, to be stepped once per optimizer step.

    The names, each with the optimizer's learning rate as its peak:

    - "constant": the peak, after the warmup.
    - "linear": straight down to zero at the last step.
    - "cosine": half a cosine down to zero at the last step (Loshchilov and Hutter 2017, without restarts).
    - "inverse_sqrt": the root of warmup / step (Vaswani et al. 2017); it has no end.
    - "one_cycle": up from 1/25 of the peak and down to 1/250,000 of it along half cosines, as torch's `OneCycleLR`
      without its momentum (Smith and Topin 2019); it rises for 30 % of the steps unless a warmup is given.

    Args:
        choice: A name; a function of the optimizer that returns a scheduler; a scheduler of this optimizer; or None,
            which is "constant" if there is a warmup and nothing otherwise.
        optimizer: The optimizer whose learning rate is scheduled.
        total_steps: Optimizer steps of the whole run, or None if that is not known.
        warmup: Steps to reach the peak in (an int), or the share of `total_steps` (a float below 1). Only names use it.

    Returns:
        The scheduler, or None if the rate is constant.

    Raises:
        ModelError: If the name is not known, it needs the total and there is none, the warmup is negative or a float
            of 1 or more, or what was given or returned is no scheduler of this optimizer.
    """
    if isinstance(choice, LRScheduler):
        return _check_bound(choice, optimizer)
    if choice is not None and not isinstance(choice, str):
        made = choice(optimizer)
        if not isinstance(made, LRScheduler):
            raise ModelError(
                f"The schedule function returned a {type(made).__name__}; return a "
                "torch.optim.lr_scheduler.LRScheduler."
            )
        return _check_bound(made, optimizer)
    name = _known_name(choice or "constant")
    steps = _warmup_steps(warmup, total_steps)
    if name == "constant" and not steps:
        return None
    if name in NEED_TOTAL and total_steps is None:
        raise ModelError(
            f'The schedule "{name}" ends at the last step, and how many steps there are is not known; pass max_steps '
            'to the Trainer, or choose "constant" or "inverse_sqrt".'
        )
    # A bound method, because LambdaLR saves and restores a callable object's fields: a resumed run with more steps than
    # before would then keep the old total and train on at a rate of zero.
    return LambdaLR(optimizer, Schedule(name, steps, total_steps).factor)


def schedule_names() -> list[str]:
    """The names that `build_schedule` takes, sorted."""
    return sorted([*SHAPES, "one_cycle"])


def _constant(step: int, warmup: int, total: int) -> float:
    return 1.0


def _linear(step: int, warmup: int, total: int) -> float:
    return 1.0 - _progress(step, warmup, total)


def _cosine(step: int, warmup: int, total: int) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * _progress(step, warmup, total)))


def _inverse_sqrt(step: int, warmup: int, total: int) -> float:
    start = max(warmup, 1)
    return math.sqrt(start / max(step, start))


def _progress(step: int, start: int, end: int) -> float:
    """How far `step` is from `start` to `end`, from 0 to 1."""
    return min(max(step - start, 0) / max(end - start, 1), 1.0)


def _one_cycle(step: int, warmup: int, total: int) -> float:
    first, last = 1 / 25, 1 / 25 / 10_000
    # torch's OneCycleLR ends its rise one step before 30 % of the total.
    peak = warmup or 0.3 * total - 1
    if step <= peak:
        return _along_cosine(first, 1.0, step / peak if peak > 0 else 1.0)
    return _along_cosine(1.0, last, min((step - peak) / max(total - 1 - peak, 1e-9), 1.0))


def _along_cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * progress))


SHAPES: dict[str, Callable[[int, int, int], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "inverse_sqrt": _inverse_sqrt,
}
"""What each shape does after the warmup: a function of the step, the steps of warmup and of the whole run."""

NEED_TOTAL = frozenset({"linear", "cosine", "one_cycle"})
"""The shapes that end at the last step."""


def _known_name(name: str) -> str:
    key = name.lower().replace("-", "_")
    names = schedule_names()
    if key in names:
        return key
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    hint = f' Did you mean "{close[0]}"?' if close else ""
    raise ModelError(f'No schedule is called "{name}".{hint} The names are {", ".join(names)}.')


def _warmup_steps(warmup: int | float, total_steps: int | None) -> int:
    if warmup < 0 or (isinstance(warmup, float) and warmup >= 1):
        raise ModelError(
            f"warmup={warmup} is neither a number of steps nor a share of them; give an int, or a float from 0 to "
            "below 1."
        )
    if isinstance(warmup, int) or warmup == 0:
        return int(warmup)
    if total_steps is None:
        raise ModelError(
            f"warmup={warmup} is a share of the steps, and how many there are is not known; pass max_steps to the "
            "Trainer, or give warmup as a number of steps."
        )
    return round(warmup * total_steps)


def _check_bound(scheduler: LRScheduler, optimizer: Optimizer) -> LRScheduler:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ModelError(
            "ReduceLROnPlateau waits for a metric, and a schedule is stepped once per optimizer step without one; "
            "choose another schedule, or step it from a callback's on_validation_end."
        )
    if scheduler.optimizer is not optimizer:
        raise ModelError(
            f"The {type(scheduler).__name__} that was given drives another optimizer than the one that trains the "
            "model; give a function of the optimizer that makes it, or the same optimizer to configure(optimizer=...)."
        )
    return scheduler
