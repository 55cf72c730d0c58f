"""The collectives at the border of split layers, each with the one that its gradient goes back by."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from paraflow.tensor_parallel.traffic import (
    exchange_columns,
    exchange_rows,
    gather_along,
    part_along,
    reduce_scatter_along,
    sum_over,
)

Sizes = tuple[int, ...]


def copy(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The same tensor, whose gradient is the sum of all ranks'."""
    return _Copy.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def sum_up(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of all ranks' tensors; its gradient, which is the same on all, goes to each summand."""
    return _SumUp.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def gather(x: torch.Tensor, dim: int, sizes: Sizes, group: dist.ProcessGroup, scale: float = 1.0) -> torch.Tensor:
    """All ranks' tensors along a dimension; backward sums over ranks, takes this rank's part and multiplies it."""
    return _Gather.apply(x, dim, sizes, group, scale)  # type: ignore[no-any-return, no-untyped-call]


def reduce_scatter(
    x: torch.Tensor, dim: int, sizes: Sizes, group: dist.ProcessGroup, scale: float = 1.0
) -> torch.Tensor:
    """This rank's part of the sum of all ranks' tensors; backward multiplies gradients and joins them."""
    return _ReduceScatter.apply(x, dim, sizes, group, scale)  # type: ignore[no-any-return, no-untyped-call]


def collect(x: torch.Tensor, dim: int, sizes: Sizes, group: dist.ProcessGroup) -> torch.Tensor:
    """All ranks' tensors along a dimension; the gradient, which is the same on all ranks, is cut."""
    return _Collect.apply(x, dim, sizes, group)  # type: ignore[no-any-return, no-untyped-call]


def scatter(x: torch.Tensor, dim: int, sizes: Sizes, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of a tensor that all ranks hold alike; gradients are joined."""
    return _Scatter.apply(x, dim, sizes, group)  # type: ignore[no-any-return, no-untyped-call]


def own_rows(x: torch.Tensor, rows: Sizes, columns: Sizes, group: dist.ProcessGroup, scale: float) -> torch.Tensor:
    """From [all rows, own columns] to [own rows, all columns]; gradients are multiplied and go back alike."""
    return _OwnRows.apply(x, rows, columns, group, scale)  # type: ignore[no-any-return, no-untyped-call]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.detach()  # no view, which would keep its input

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return sum_over(gradients[0], ctx.group), None


class _SumUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return sum_over(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dim: int, sizes: Sizes, group: dist.ProcessGroup, scale: float
    ) -> torch.Tensor:
        ctx.how, ctx.scale = (dim, sizes, group), scale
        return gather_along(x, dim, sizes, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        part = reduce_scatter_along(gradients[0], *ctx.how)
        return _scaled(part, ctx.scale), None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dim: int, sizes: Sizes, group: dist.ProcessGroup, scale: float
    ) -> torch.Tensor:
        ctx.how, ctx.scale = (dim, sizes, group), scale
        return reduce_scatter_along(x, dim, sizes, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gather_along(_scaled(gradients[0], ctx.scale), *ctx.how), None, None, None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, sizes: Sizes, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.how = dim, sizes, dist.get_rank(group)
        return gather_along(x, dim, sizes, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return part_along(gradients[0], *ctx.how).contiguous(), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, sizes: Sizes, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.how = dim, sizes, group
        return part_along(x, dim, sizes, dist.get_rank(group)).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gather_along(gradients[0], *ctx.how), None, None, None


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, rows: Sizes, columns: Sizes, group: dist.ProcessGroup, scale: float
    ) -> torch.Tensor:
        ctx.how, ctx.scale = (rows, columns, group), scale
        return exchange_rows(x, rows, columns, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return exchange_columns(_scaled(gradients[0], ctx.scale), *ctx.how), None, None, None, None


def _scaled(gradient: torch.Tensor, scale: float) -> torch.Tensor:
    return gradient if scale == 1.0 else gradient * scale
