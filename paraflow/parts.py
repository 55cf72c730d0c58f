"""Tensors of which each rank holds a part: torch's DTensor, and the few things the engine and checkpoints ask of it.

A part is a box of the whole tensor, a range along each of its dimensions, or some boxes of it. Nothing here imports
DTensor until there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from math import prod
from typing import Any, Protocol

import torch

Box = tuple[slice, ...]
Shape = tuple[int, ...]


class Sliceable(Protocol):
    """A whole tensor, in memory or on disk, of which a box can be taken."""

    @property
    def shape(self) -> Any:
        """The shape of the whole."""

    def __getitem__(self, box: Any) -> torch.Tensor: ...


@dataclass(frozen=True)
class Elsewhere:
    """Stands in a state for a tensor of which this rank holds nothing, because it belongs to another stage.

    Attributes:
        shape: The shape of the whole.
        dtype: Its dtype.

    Example:
        >>> Elsewhere.like(torch.zeros(2, 3))
        Elsewhere(shape=(2, 3), dtype=torch.float32)
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def like(cls, tensor: torch.Tensor) -> Elsewhere:
        """Returns what stands for a tensor, on any device, or for one that is spread over ranks."""
        return cls(tuple(tensor.shape), tensor.dtype)


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
    """Returns where in the whole this rank's part lies, where it is one box; an ordinary tensor is the whole.

    Raises:
        ValueError: It is several boxes; see `boxes_of`.
    """
    boxes = boxes_of(tensor)
    if len(boxes) != 1:
        raise ValueError(f"This rank's part of a tensor of shape {tuple(tensor.shape)} is {len(boxes)} boxes of it.")
    return boxes[0][1]


def boxes_of(tensor: torch.Tensor) -> list[tuple[Box, Box]]:
    """Returns the boxes that this rank's part is made of: where each lies in the part, and where in the whole.

    It is one box of the whole nearly always. It is several where a dimension is dealt out in turns: a query, key and
    value projection in one weight, split over ranks by heads, or a dimension that two mesh dimensions divide, the inner
    one first.

    Example:
        >>> boxes_of(torch.zeros(2, 3))
        [((slice(0, 2, None), slice(0, 3, None)), (slice(0, 2, None), slice(0, 3, None)))]
    """
    if not is_spread(tensor):
        box = tuple(slice(0, size) for size in tensor.shape)
        return [(box, box)]
    layout: Any = tensor
    mesh = layout.device_mesh
    return _boxes(tuple(tensor.shape), tuple(mesh.shape), tuple(mesh.get_coordinate()), tuple(layout.placements))


@lru_cache(maxsize=4096)
def _boxes(shape: Shape, ranks: Shape, place: Shape, placements: tuple[Any, ...]) -> list[tuple[Box, Box]]:
    along: list[list[tuple[slice, slice]]] = []
    splits = _splits(ranks, placements)
    for dim, size in enumerate(shape):
        of_dim = [(kind, ranks[mesh_dim], place[mesh_dim]) for mesh_dim, kind in splits if kind.dim == dim]
        along.append(_runs(size, of_dim))
    return [tuple(zip(*pairs, strict=True)) for pairs in product(*along)] if shape else [((), ())]


def _splits(ranks: Shape, placements: Sequence[Any]) -> list[tuple[int, Any]]:
    """The mesh dimensions that divide a tensor, in the order in which they do, each with how it does.

    It is the order of the mesh, but where ``fully_shard`` has divided further what an inner dimension had divided
    before: torch says so by an outer stride over as many pieces as there are ranks within. As torch reads that, it is
    not what ``fully_shard`` does where it does not come out even, nor where the inner split has a stride as well.
    """
    from torch.distributed.tensor import Shard

    first: list[tuple[int, Any]] = []
    last: list[tuple[int, Any]] = []
    for mesh_dim, kind in enumerate(placements):
        if not hasattr(kind, "dim"):
            continue
        within = zip(ranks[mesh_dim + 1 :], placements[mesh_dim + 1 :], strict=True)
        inner = prod(count for count, other in within if getattr(other, "dim", None) == kind.dim)
        if inner > 1 and getattr(kind, "split_factor", None) == inner:
            last.insert(0, (mesh_dim, Shard(kind.dim)))
        else:
            first.append((mesh_dim, kind))
    return [*first, *last]


def _chunks(held: torch.Tensor, kind: Any, ranks: int) -> list[torch.Tensor]:
    """Divides indices as torch divides the dimension that a placement shards: by its own code."""
    chunks, _ = kind._split_tensor(held.view([1] * kind.dim + [-1]), ranks, with_padding=False, contiguous=True)
    return [chunk.flatten() for chunk in chunks]


def _runs(size: int, splits: Sequence[tuple[Any, int, int]]) -> list[tuple[slice, slice]]:
    """The runs of a dimension that this rank holds: in its part, and in the whole."""
    if not splits:
        return [(slice(0, size), slice(0, size))]
    held = torch.arange(size)
    for kind, ranks, place in splits:
        held = _chunks(held, kind, ranks)[place]
    if held.numel() == 0:
        return [(slice(0, 0), slice(0, 0))]
    begins = [0, *(torch.nonzero(held.diff() != 1).flatten() + 1).tolist(), held.numel()]
    first = held.tolist()
    return [(slice(a, b), slice(first[a], first[a] + b - a)) for a, b in pairwise(begins)]


def cut(value: Sliceable, like: torch.Tensor) -> torch.Tensor:
    """Returns what this rank has of a whole tensor that is laid out as another is; perhaps a view of the whole.

    Args:
        value: The whole, in memory or on disk; of one on disk only the part is read.
        like: A tensor of its shape, spread over ranks or not.

    Returns:
        A tensor of the shape of ``local(like)``.
    """
    boxes = boxes_of(like)
    return assembled([value[box] for _, box in boxes], boxes)


def assembled(pieces: Sequence[torch.Tensor], boxes: Sequence[tuple[Box, Box]]) -> torch.Tensor:
    """Returns the part that is made of pieces, one for each of `boxes_of`."""
    if len(pieces) == 1:
        return pieces[0]
    dims = range(pieces[0].dim())
    part = pieces[0].new_empty([max(inside[dim].stop for inside, _ in boxes) for dim in dims])
    for piece, (inside, _) in zip(pieces, boxes, strict=True):
        part[inside] = piece
    return part


def writes(tensor: torch.Tensor) -> bool:
    """Whether this rank is the first of those that hold the same part of a sharded tensor."""
    layout: Any = tensor
    coordinates = layout.device_mesh.get_coordinate()
    return coordinates is not None and all(
        place == 0 for place, kind in zip(coordinates, layout.placements, strict=True) if kind.is_replicate()
    )


def holders_of(tensor: torch.Tensor) -> Shape:
    """Returns the ranks that a spread tensor is spread over: those of the world that are in its layout."""
    layout: Any = tensor
    return _ranks_in(layout.device_mesh)


@lru_cache(maxsize=64)
def _ranks_in(device_mesh: Any) -> Shape:
    return tuple(device_mesh.mesh.flatten().tolist())


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
    layout: Any = tensor.detach()
    if any(hasattr(kind, "split_factor") for kind in layout.placements):
        return _joined(layout)  # torch's own joins only what is divided evenly
    full: torch.Tensor = layout.full_tensor()
    return full


def _joined(layout: Any) -> torch.Tensor:
    """Undoes each mesh dimension's split, the last that was made first."""
    mesh, place = layout.device_mesh, layout.device_mesh.get_coordinate()
    sizes = list(layout.shape)
    undo: list[tuple[int, int, list[torch.Tensor]]] = []
    for mesh_dim, kind in _splits(tuple(mesh.shape), layout.placements):
        chunks = _chunks(torch.arange(sizes[kind.dim]), kind, mesh.size(mesh_dim))
        undo.append((mesh_dim, kind.dim, chunks))
        sizes[kind.dim] = chunks[place[mesh_dim]].numel()
    value: torch.Tensor = layout.to_local()
    for mesh_dim, dim, chunks in reversed(undo):
        value = _from_chunks(value, dim, chunks, mesh.get_group(mesh_dim))
    return value


def _from_chunks(mine: torch.Tensor, dim: int, chunks: Sequence[torch.Tensor], group: Any) -> torch.Tensor:
    """Joins along a dimension what ranks have of it: each rank's indices are given."""
    import torch.distributed as dist

    rows = mine.movedim(dim, 0)
    padded = rows.new_zeros((max(chunk.numel() for chunk in chunks), *rows.shape[1:]))
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in chunks]
    dist.all_gather(gathered, padded, group=group)
    found = rows.new_empty((sum(chunk.numel() for chunk in chunks), *rows.shape[1:]))
    for part, chunk in zip(gathered, chunks, strict=True):
        found[chunk.to(found.device)] = part[: chunk.numel()]
    return found.movedim(0, dim).contiguous()


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
    return as_part(cut(value, like).to(local(like).device), like)


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
