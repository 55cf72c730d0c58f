"""What a collective is about to do, in words, and what of it every rank of the group must have alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# Each collective, with the argument whose types and numbers of elements must be the same on every rank.
COLLECTIVES: dict[str, str | None] = {
    "all_gather": "tensor_list",
    "all_gather_coalesced": "input_tensor_list",
    "all_gather_into_tensor": "input_tensor",
    "all_gather_object": None,
    "all_gather_single": "input_tensor",
    "all_reduce": "tensor",
    "all_reduce_coalesced": "tensors",
    "all_to_all": None,
    "all_to_all_single": None,
    "barrier": None,
    "broadcast": "tensor",
    "broadcast_object_list": None,
    "gather": "tensor",
    "gather_object": None,
    "monitored_barrier": None,
    "reduce": "tensor",
    "reduce_scatter": "input_list",
    "reduce_scatter_single": "input",
    "reduce_scatter_tensor": "input",
    "scatter": "tensor",
    "scatter_object_list": None,
    "_all_gather_base": "input_tensor",
    "_reduce_scatter_base": "input",
}
# What the words show, where it is not what is compared.
_SHOWN = {"all_gather": "tensor", "all_to_all": "input_tensor_list", "all_to_all_single": "input"}
_MANY = 3


@dataclass(frozen=True)
class Call:
    """A call of a collective.

    Attributes:
        what: The call in words: ``all_reduce(float32[10])``.
        key: What must be the same on every rank.
        symmetric: Whether every rank has the same part in it, so that all are likely to call it from the same line.
        ranks: The ranks of its group.
    """

    what: str
    key: str
    symmetric: bool
    ranks: tuple[int, ...]


def describe(name: str, arguments: Mapping[str, Any]) -> Call | None:
    """Returns what a call of a collective is about to do, or None where this rank has no part in it.

    Args:
        name: The name of the collective, one of `COLLECTIVES`.
        arguments: Its arguments by name, defaults included.
    """
    if not dist.is_initialized():
        return None  # torch says so better
    world = dist.distributed_c10d._get_default_group()
    group = arguments.get("group")
    group = world if group is None else group
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        return None
    ranks = tuple(dist.get_process_group_ranks(group))
    compared = COLLECTIVES[name]
    parts = [_reduction(arguments), _root(arguments, group, ranks)]
    shown = _in_words(arguments.get(_SHOWN.get(name, compared or "")))
    if name == "broadcast_object_list":
        parts.append(f"{len(arguments['object_list'])} objects")
    words = ", ".join(part for part in (shown, *parts) if part)
    where = "" if group is world else f" in group {group.group_name} of ranks {', '.join(map(str, ranks))}"
    sizes = _sizes(arguments[compared]) if compared else _types(arguments.get(_SHOWN.get(name, "")))
    return Call(
        what=f"{name}({words}){where}",
        key=" ".join([name, sizes, *parts, group.group_name]),
        symmetric=bool(compared or name in _SHOWN) and not parts[1],
        ranks=ranks,
    )


def _reduction(arguments: Mapping[str, Any]) -> str:
    op = arguments.get("op", dist.ReduceOp.SUM)
    name = str(getattr(op, "name", type(op).__name__)).lower()
    return "" if name == "sum" else name


def _root(arguments: Mapping[str, Any], group: dist.ProcessGroup, ranks: tuple[int, ...]) -> str:
    """Which rank of the world sends or receives, however the call says it."""
    for end, preposition in (("src", "from"), ("dst", "to")):
        if end in arguments:
            place = arguments.get(f"group_{end}")
            rank = arguments[end] if place is None else dist.get_global_rank(group, place)
            return f"{preposition} rank {ranks[0] if rank is None else rank}"
    return ""


def _tensors(value: Any) -> list[torch.Tensor]:
    parts = value if isinstance(value, list | tuple) else [value]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _in_words(value: Any) -> str:
    tensors = _tensors(value)
    words = [f"{_type(tensor)}{list(tensor.shape)}" for tensor in tensors[:_MANY]]
    return ", ".join([*words, f"{len(tensors) - _MANY} more"] if len(tensors) > _MANY else words)


def _sizes(value: Any) -> str:
    """Shapes may differ where the number of elements does not: ``[]`` and ``[1]`` are communicated alike."""
    return ",".join(f"{tensor.device.type}:{_type(tensor)}:{tensor.numel()}" for tensor in _tensors(value))


def _types(value: Any) -> str:
    return ",".join(sorted({f"{tensor.device.type}:{_type(tensor)}" for tensor in _tensors(value)}))


def _type(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
