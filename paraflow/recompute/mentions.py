"""Whether the code of a block mentions what must not be run twice."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

_CHOOSES = ("topk", "sort", "msort", "argsort", "argmax", "argmin", "multinomial", "nonzero", "unique", "bincount")
_GATHERS = ("all_gather", "all_gather_into_tensor", "all_gather_tensor", "all_to_all", "all_to_all_single")
_REDUCES = ("all_reduce", "reduce_scatter", "reduce_scatter_tensor", "distributed", "dist")
_POINT_TO_POINT = ("broadcast", "send", "recv", "isend", "irecv")
_NAMES = frozenset((*_CHOOSES, *_GATHERS, *_REDUCES, *_POINT_TO_POINT, "histc", "generator"))


def mentions_what_is_not_run_twice(block: nn.Module) -> bool:
    """Whether a block's code mentions a collective, a choice or a generator, which it may come to use at any step.

    The methods of its modules are read, and the functions of the user's that they call. It is no proof of the contrary:
    what is found out by nothing but the running code is refused when it happens.

    Args:
        block: The block.
    """
    seen: set[CodeType] = set()
    return any(
        _mentions(function, seen)
        for kind in {type(part) for part in block.modules()}
        for base in kind.__mro__
        if not base.__module__.startswith("torch.") and base is not object
        for function in map(inspect.unwrap, filter(inspect.isfunction, vars(base).values()))
    )


def _mentions(function: Callable[..., Any], seen: set[CodeType]) -> bool:
    if not isinstance(function, FunctionType) or function.__code__ in seen:
        return False
    seen.add(function.__code__)
    for name in _names(function.__code__):
        if name in _NAMES:
            return True
        called = function.__globals__.get(name)
        if isinstance(called, FunctionType) and not called.__module__.startswith("torch.") and _mentions(called, seen):
            return True
    return False


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, tuple):  # names of keyword arguments
            yield from (name for name in constant if isinstance(name, str))
