"""A step's gradients, of which each rank may hold parts or some only: their norm, and what multiplies them all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from paraflow.mesh import Mesh
from paraflow.normaliser import sum_dtype
from paraflow.parts import local

if TYPE_CHECKING:
    from paraflow.plugins.base import Plugin

Dims = tuple[str, ...]


class Gradients:
    """The gradients of the parameters that a rank trains.

    Args:
        parameters: The trained parameters by name.
        mesh: The ranks.
        partitioning: The plugins that say over which mesh dimensions a parameter is partitioned.

    Attributes:
        dims: The mesh dimensions over which ranks hold different parts of the parameters; the same on every rank.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], mesh: Mesh, partitioning: Sequence[Plugin]
    ) -> None:
        self._mesh = mesh
        self._parameters: list[nn.Parameter] = []
        self._groups: dict[Dims, list[nn.Parameter]] = {}
        for name, parameter in parameters:
            self._parameters.append(parameter)
            dims = _dims_of(name, parameter, partitioning)
            if dims is not None:
                self._groups.setdefault(dims, []).append(parameter)
        if partitioning:
            # A rank that holds nothing of a kind takes part in its sum all the same.
            self._groups = {dims: self._groups.get(dims, []) for dims in _on_any_rank(self._groups, mesh)}
        self.dims: Dims = tuple({dim: None for dims in self._groups for dim in dims})

    def local(self) -> list[torch.Tensor]:
        """Returns the gradients there are, in the order of the parameters: this rank's part of each."""
        return [local(p.grad) for p in self._parameters if p.grad is not None]

    def scale(self, factor: torch.Tensor) -> None:
        """Multiplies every gradient by a number, a 0-dim tensor; some may be on the host."""
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for gradient in self.local():
            by_device.setdefault(gradient.device, []).append(gradient)
        for device, gradients in by_device.items():
            torch._foreach_mul_(gradients, factor.to(device))

    def norm(self) -> torch.Tensor:
        """Returns the norm of the whole gradient, over every parameter and every rank that holds a part: 0-dim."""
        if not self.dims:
            return torch.nn.utils.get_total_norm(self.local())
        exact = sum_dtype(self._mesh.device)  # fp32 does not hold the squares of all that it holds
        squares, dtype = torch.zeros((), device=self._mesh.device, dtype=exact), torch.float32
        for dims, parameters in self._groups.items():
            gradients = [local(p.grad) for p in parameters if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
            squares = squares + self._mesh.all_reduce(norm.to(squares.device, exact) ** 2, dims)
            dtype = torch.promote_types(dtype, norm.dtype)
        return squares.sqrt().to(dtype)


def _dims_of(name: str, parameter: nn.Parameter, partitioning: Sequence[Plugin]) -> Dims | None:
    """The mesh dimensions a parameter is partitioned over, or None where another rank counts it."""
    found: set[str] = set()
    for plugin in partitioning:
        dims = plugin.partitioned_over(name, parameter)
        if dims is None:
            return None
        found.update(dims)
    return tuple(sorted(found))


def _on_any_rank(groups: Iterable[Dims], mesh: Mesh) -> list[Dims]:
    said = mesh.gather_texts(json.dumps(sorted(groups)))
    return sorted({tuple(dims) for text in said for dims in json.loads(text)})
