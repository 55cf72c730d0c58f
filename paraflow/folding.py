"""Parts of a mesh's dimensions: one cut in two, into groups of neighbours and of same places; and groups of places."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def halves_of(sizes: Mapping[str, int], dim: str, inner: int, device_type: str) -> dict[str, DeviceMesh]:
    """Makes the device meshes of ``{dim}_outer`` and ``{dim}_inner``, each of one dimension; all ranks make them alike.

    Args:
        sizes: The ranks along each dimension of the world, outer to inner.
        dim: The one that is cut.
        inner: The ranks of a group; they divide the dimension's.
        device_type: Where the ranks compute.
    """
    from torch.distributed.device_mesh import init_device_mesh

    halves = {f"{dim}_outer": sizes[dim] // inner, f"{dim}_inner": inner}
    cut: dict[str, int] = {}
    for name, size in sizes.items():
        cut.update(halves if name == dim else {name: size})
    mesh = init_device_mesh(device_type, tuple(cut.values()), mesh_dim_names=tuple(cut))
    return {half: mesh[half] for half in halves}


@dataclass
class _Made:
    """The groups of places that this process has made, and the world that they are of."""

    world: weakref.ref[dist.ProcessGroup] | None = None
    groups: dict[tuple[str, tuple[int, ...]], Any] = field(default_factory=dict)


_made = _Made()


def group_once(dim: str, members: tuple[int, ...]) -> Any:
    """Returns the process group of some ranks, which all ranks of the world make together the first time.

    Args:
        dim: The dimension that they lie along; along another they have another group.
        members: Their ranks, in order.
    """
    world = dist.distributed_c10d._get_default_group()
    if _made.world is None or _made.world() is not world:
        _made.world, _made.groups = weakref.ref(world), {}
    if (dim, members) not in _made.groups:
        _made.groups[dim, members] = dist.new_group(list(members))
    return _made.groups[dim, members]


def forget_groups() -> None:
    """Lets go of these groups, which hold their threads."""
    _made.groups = {}
