"""A callback made of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paraflow.callbacks.base import HOOKS, Callback
from paraflow.interval import Interval

if TYPE_CHECKING:
    from paraflow.trainer import Trainer


class LambdaCallback(Callback):
    """Calls a function at an event, each given the trainer and the logs.

    Args:
        every: How often ``on_step_end`` is called.
        **functions: Functions by the name of their event.

    Raises:
        TypeError: There is no event of a name.

    Example:
        >>> LambdaCallback(on_epoch_end=lambda trainer, logs: print(logs["loss"]))
        LambdaCallback(on_epoch_end)
        >>> LambdaCallback(on_batch_end=print)
        Traceback (most recent call last):
        TypeError: There is no event 'on_batch_end'; the events are on_train_begin, on_train_end, ...
    """

    def __init__(
        self, *, every: Interval | str | int = 1, **functions: Callable[[Trainer, dict[str, Any]], Any]
    ) -> None:
        for name, function in functions.items():
            if name not in HOOKS:
                raise TypeError(f"There is no event {name!r}; the events are {', '.join(HOOKS)}.")
            if not callable(function):
                raise TypeError(f"{name} must be a function of (trainer, logs), not {function!r}.")
        self.every = every
        self._names = tuple(functions)
        for name, function in functions.items():
            setattr(self, name, function)

    def __repr__(self) -> str:
        return f"LambdaCallback({', '.join(self._names)})"
