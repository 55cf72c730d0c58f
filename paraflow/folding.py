"""A dimension of the mesh cut in two: groups of neighbours, and the ranks that have the same place in each group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

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
