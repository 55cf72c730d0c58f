"""Dropout switched off for a while, wherever a model calls it: other ranks would draw other numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_DROPOUTS: tuple[Callable[..., Any], ...] = (
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    torch.dropout,
)


class WithoutDropout(TorchFunctionMode):
    """Calls of dropout return their input; attention drops no weight.

    Attributes:
        seen: Whether there was any that would have dropped something.

    Example:
        >>> with WithoutDropout() as mode:
        ...     torch.nn.functional.dropout(torch.ones(3), 0.5)
        tensor([1., 1., 1.])
        >>> mode.seen
        True
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Runs a function of torch, without dropout."""
        named: Mapping[str, Any] = kwargs or {}
        if func in _DROPOUTS:
            probability, training = _arguments(args, named)
            self.seen |= bool(training) and probability > 0
            return args[0] if args else named["input"]
        if func is functional.scaled_dot_product_attention:
            return func(*self._undropped(args), **self._undropped_by_name(named))
        return func(*args, **named)

    def _undropped(self, args: Sequence[Any]) -> Sequence[Any]:
        if len(args) <= 4:
            return args
        self.seen |= args[4] > 0
        return (*args[:4], 0.0, *args[5:])

    def _undropped_by_name(self, named: Mapping[str, Any]) -> Mapping[str, Any]:
        if "dropout_p" not in named:
            return named
        self.seen |= named["dropout_p"] > 0
        return {**named, "dropout_p": 0.0}


def _arguments(args: Sequence[Any], named: Mapping[str, Any]) -> tuple[float, bool]:
    probability = args[1] if len(args) > 1 else named.get("p", 0.5)
    return probability, args[2] if len(args) > 2 else named.get("training", True)


@contextmanager
def without_dropout() -> Iterator[WithoutDropout]:
    """Runs a block in which nothing is dropped; what is given says whether anything would have been."""
    with WithoutDropout() as mode:
        yield mode
