"""Which operators' outputs are kept when a block is recomputed.

Everything is decided by an operator and its place: from 0, which of its calls in the block's forward it is. What is not
kept is computed again, which is always right where it is deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

Keeps = Callable[[Any, int], bool]
"""Whether the output of an operator's call is kept, given the operator and the place of the call."""

_COLLECTIVES = frozenset(
    {"_c10d_functional", "_c10d_functional_autograd", "c10d", "c10d_functional", "symm_mem", "_dtensor"}
)
_ROUTING = frozenset(
    "aten::" + name
    for name in (
        "topk",
        "sort",
        "argsort",
        "argmax",
        "argmin",
        "multinomial",
        "nonzero",
        "_unique2",
        "bincount",
        "histc",
    )
)
_PRODUCTS = frozenset(
    "aten::" + name
    for name in ("mm", "addmm", "bmm", "baddbmm", "addbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")
)
_KEPT_ALWAYS: dict[int, tuple[Any, bool]] = {}  # by id: torch hashes an operator in Python, at every call of every one
_FIRST_IS_WRITTEN = frozenset({"c10d"})


@cache
def is_collective(operator: Any) -> bool:
    """Whether an operator communicates: run again, it would do so again.

    To wait again for what has arrived costs nothing, so that waiting is not counted among these.
    """
    return str(getattr(operator, "namespace", "")) in _COLLECTIVES and not _name(operator).endswith("wait_tensor")


def is_kept_always(operator: Any) -> bool:
    """Whether an operator is never run again: it communicates, or it chooses (an expert, a sample).

    A choice between values that are nearly equal may come out otherwise the second time.
    """
    known = _KEPT_ALWAYS.get(id(operator))
    if known is None:
        known = _KEPT_ALWAYS[id(operator)] = (operator, _is_kept_always(operator))
    return known[1]


def _is_kept_always(operator: Any) -> bool:
    if _name(operator) == "aten::max":
        return "dim" in str(operator._overloadname)
    return is_collective(operator) or _name(operator) in _ROUTING


def is_never_run_again(operator: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is never run again: its operator is of those, or draws from a generator that it was given."""
    return is_kept_always(operator) or (bool(kwargs) and kwargs.get("generator") is not None)


@cache
def is_expensive(operator: Any) -> bool:
    """Whether an operator is a matrix product, a convolution or attention."""
    name = _name(operator)
    backward = name.endswith(("_backward", "_backward_for_cpu")) or "_backward_" in name
    return not backward and (name in _PRODUCTS or "convolution" in name or "attention" in name or "flash_attn" in name)


@cache
def may_be_kept(operator: Any) -> bool:
    """Whether keeping an operator's output means anything: not for views, nor for what writes in place.

    Casts are left out because autocast caches some of them, so that they are not counted the same twice.
    """
    if not isinstance(operator, torch._ops.OpOverload):
        return True
    return not (
        operator._schema.is_mutable or operator.is_view or _name(operator) in ("aten::_to_copy", "aten::detach")
    )


def nothing_more(operator: Any, place: int) -> bool:
    """Keeps only what is always kept."""
    return False


def what_is_expensive(operator: Any, place: int) -> bool:
    """Keeps the outputs of matrix products, convolutions and attention, and what is always kept."""
    return is_expensive(operator)


def these(operations: Sequence[tuple[str, int]]) -> Keeps:
    """Returns what keeps the outputs of the given operations, and what is always kept.

    Example:
        >>> keeps = these([("aten.mm.default", 1)])
        >>> [keeps(torch.ops.aten.mm.default, place) for place in (0, 1)]
        [False, True]
    """
    chosen = frozenset(operations)
    return lambda operator, place: (str(operator), place) in chosen


def written_by(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Returns the tensors that a call of an operator writes into."""
    positions, names = _written_arguments(operator)
    values = [args[at] for at in positions if at < len(args)] + [kwargs[name] for name in names if name in kwargs]
    return [tensor for value in values for tensor in _tensors(value)]


@cache
def _written_arguments(operator: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    if str(getattr(operator, "namespace", "")) in _FIRST_IS_WRITTEN:
        return (0,), ()  # torch's collectives do not say what they write
    if not isinstance(operator, torch._ops.OpOverload):
        return (), ()
    written = [
        (at, argument.name)
        for at, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tuple(at for at, _ in written), tuple(name for _, name in written)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for child in value for tensor in _tensors(child)] if isinstance(value, (list, tuple)) else []


def _name(operator: Any) -> str:
    if isinstance(operator, torch._ops.OpOverload):
        return str(operator._schema.name)
    return str(getattr(operator, "__name__", operator))
