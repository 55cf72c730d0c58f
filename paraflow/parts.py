"""Tensors of which each rank holds a part: torch's DTensor, and the few things the engine and checkpoints ask of it.

A part is a box: a range along each dimension of the whole tensor. Nothing here imports DTensor until there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

Box = tuple[slice, ...]


class Sliceable(Protocol):
    """A whole tensor, in memory or on disk, of which a box can be taken."""

    @property
    def shape(self) -> Any:
        """The shape of the whole."""

    def __getitem__(self, box: Any) -> torch.Tensor: ...


def is_spread(tensor: Any) -> bool:
    """Whether something is a tensor of which this rank holds a part (or a copy that it shares a layout for)."""
    return hasattr(tensor, "to_local")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what this rank holds of a tensor, with the same memory; an ordinary tensor is returned as it is.

    Example:
        >>> table = torch.zeros(2)
        >>> local(table) is table
        True
    """
    if not is_spread(tensor):
        return tensor
    with torch.no_grad():
        held: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return held


def box_of(tensor: torch.Tensor) -> Box:
    """Returns where in the whole this rank's part lies; an ordinary tensor is the whole."""
    if not is_spread(tensor):
        return tuple(slice(0, size) for size in tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    layout: Any = tensor
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, layout.device_mesh, layout.placements)
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def writes(tensor: torch.Tensor) -> bool:
    """Whether this rank is the first of those that hold the same part of a sharded tensor."""
    layout: Any = tensor
    coordinates = layout.device_mesh.get_coordinate()
    return coordinates is not None and all(
        place == 0 for place, kind in zip(coordinates, layout.placements, strict=True) if kind.is_replicate()
    )


def keep_on_host(tensor: torch.Tensor) -> None:
    """Says of a tensor that has no values yet that they belong on the host, whatever the run's device."""
    tensor._paraflow_on_host = True  # type: ignore[attr-defined]


def lives_on_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values belong on the host, whatever the run's device."""
    return getattr(tensor, "_paraflow_on_host", False)


def as_part(held: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of something that is laid out as another tensor is, seen as a sharded tensor.

    Args:
        held: The part, of the shape of ``local(like)``.
        like: A sharded tensor.
    """
    layout: Any = like
    if held.device.type != layout.device_mesh.device_type:  # from_local would move it
        make: Any = type(like)
        part: torch.Tensor = make(held, layout._spec, requires_grad=False)
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        held, layout.device_mesh, layout.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor as one device would hold it: a collective where it is sharded."""
    if not is_spread(tensor):
        return tensor
    full: torch.Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
    return full


def part_for(value: Any, like: torch.Tensor) -> torch.Tensor:
    """Returns what a rank needs of a value to give it to a tensor of its own.

    Args:
        value: A tensor, sharded in whatever way, or a whole one on disk (`Sliceable`).
        like: This rank's own, whole or sharded.

    Returns:
        A tensor that is laid out as ``like`` is: where that is sharded, of the same shards.
    """
    if is_spread(value):
        if is_spread(like) and _same_layout(value, like):
            return value  # type: ignore[no-any-return]
        value = whole(value)
    if not is_spread(like):
        return value if isinstance(value, torch.Tensor) else value[...]
    return as_part(value[box_of(like)].to(local(like).device), like)


def _same_layout(value: Any, like: Any) -> bool:
    same = value.device_mesh == like.device_mesh and value.placements == like.placements
    return bool(same and value.shape == like.shape)


def map_values(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a state with every value that is no dict, list or tuple changed.

    Example:
        >>> map_values({"a": [1, 2]}, lambda number: number + 1)
        {'a': [2, 3]}
    """
    if isinstance(value, Mapping):
        return {key: map_values(child, change) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_values(child, change) for child in value)
    return change(value)
