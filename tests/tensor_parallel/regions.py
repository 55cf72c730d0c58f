"""Regions of all ranks, and what the tests of split layers compare with."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from paraflow.parts import is_spread, local
from paraflow.tensor_parallel.region import Region


def region_of_all(gathers: int | None = None) -> Region:
    """A region of all ranks of the world."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return Region(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)), gathers)


def my_share(x: torch.Tensor, region: Region, sizes: tuple[int, ...] | None = None) -> torch.Tensor:
    """What this rank holds outside of a region of a tensor that all have: a leaf of its own."""
    if region.gathers is not None:
        sizes = sizes or region.sizes_of(x.shape[region.gathers])
        x = x.narrow(region.gathers, sum(sizes[: region.rank]), sizes[region.rank])
    share = x.detach().clone()
    return share.requires_grad_() if share.is_floating_point() else share


def assert_same_gradients(split: nn.Module, unsplit: nn.Module, tolerance: float = 1e-6) -> None:
    """The gradients of split parameters are those of whole ones."""
    names = dict(unsplit.named_parameters())
    assert dict(split.named_parameters()).keys() == names.keys()
    for name, parameter in split.named_parameters():
        expected = names[name]
        assert parameter.shape == expected.shape
        assert (parameter.grad is None) == (expected.grad is None), name
        if parameter.grad is not None and expected.grad is not None:
            part = _my_part(parameter.grad, expected.grad)
            close(local(parameter.grad), part, tolerance, name, largest=float(expected.grad.abs().max()))


def _my_part(mine: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """This rank's part of whole values, as torch divides them, without a message."""
    if not is_spread(mine):
        return values
    layout: Any = mine
    pieces, _ = layout.placements[0]._split_tensor(values, layout.device_mesh.size(), with_padding=False)
    part: torch.Tensor = pieces[layout.device_mesh.get_local_rank()]
    return part


def close(
    found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-6, what: str = "", largest: float = 0.0
) -> None:
    """Compared with the largest number of the expected tensor, or of what it is a part of."""
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    scale = max(1e-3, largest, float(expected.detach().abs().max()) if expected.numel() else 0.0)
    difference = float((found.detach() - expected.detach()).abs().max()) if expected.numel() else 0.0
    assert difference <= tolerance * scale, (what, difference, scale)


def twice(module: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The same module twice."""
    return module, copy.deepcopy(module)
