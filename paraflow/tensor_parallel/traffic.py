"""Collectives along one dimension of a tensor, where ranks may hold parts of different sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def chunk_sizes(size: int, degree: int) -> tuple[int, ...]:
    """How torch divides a size over ranks: parts of the size rounded up, the last ones shorter or empty.

    Example:
        >>> chunk_sizes(10, 4)
        (3, 3, 3, 1)
    """
    step = -(-size // degree)
    return tuple(max(0, min(step, size - step * rank)) for rank in range(degree))


def exchange_sizes(size: int, group: dist.ProcessGroup) -> tuple[int, ...]:
    """Every rank's number, in order of rank; told on the host, so that no device is waited for."""
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([size], dtype=torch.int64), group=group)
    return tuple(int(size) for size in sizes)


def all_gather(joined: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> Any:
    """Fills a tensor with those of all ranks, one behind the other along dimension 0; all are contiguous.

    Returns:
        What to wait for, where that is asked for.
    """
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
    return gather(joined, x, group=group, async_op=async_op)


def _reduce_scatter(mine: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(mine, x, group=group)


def sum_over(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of all ranks' tensors, as a new tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def gather_along(x: torch.Tensor, dim: int, sizes: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Joins all ranks' tensors along a dimension.

    Args:
        x: This rank's tensor; `sizes` has its size along `dim`, at this rank's place.
        dim: The dimension; the others are alike on all ranks.
        sizes: Every rank's size along it.
        group: The ranks.
    """
    return begin_gather(x, dim, sizes, group)()


def begin_gather(
    x: torch.Tensor, dim: int, sizes: Sequence[int], group: dist.ProcessGroup
) -> Callable[[], torch.Tensor]:
    """Begins what `gather_along` does, and returns what waits for it."""
    sent = _padded(x, dim, max(sizes))
    joined = sent.new_empty((len(sizes), *sent.shape))
    work = all_gather(joined.flatten(0, 1), sent, group, async_op=True)

    def wait() -> torch.Tensor:
        work.wait()
        if dim % x.dim() == 0 and min(sizes) == max(sizes):
            return joined.flatten(0, 1)
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(joined, sizes, strict=True)], dim)

    return wait


def reduce_scatter_along(x: torch.Tensor, dim: int, sizes: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Sums all ranks' tensors, and returns this rank's part of the sum along a dimension.

    Args:
        x: A tensor of the same shape on all ranks, of size sum(sizes) along `dim`.
        dim: The dimension.
        sizes: Every rank's size along it, of the result.
        group: The ranks.
    """
    longest, mine = max(sizes), sizes[dist.get_rank(group)]
    if dim % x.dim() == 0 and min(sizes) == longest:
        sent = x.contiguous()
    else:
        sent = torch.cat([_padded(part, dim, longest) for part in torch.split(x, list(sizes), dim)])
    received = sent.new_empty((sent.shape[0] // len(sizes), *sent.shape[1:]))
    _reduce_scatter(received, sent, group)
    return received if mine == longest else received.narrow(dim, 0, mine).contiguous()


def _padded(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """A tensor of a size along a dimension, with zeros behind; contiguous."""
    if x.shape[dim] == size:
        return x.contiguous()
    shape = list(x.shape)
    shape[dim] = size - x.shape[dim]
    return torch.cat((x, x.new_zeros(shape)), dim)


def part_along(x: torch.Tensor, dim: int, sizes: Sequence[int], rank: int) -> torch.Tensor:
    """A rank's part of a tensor along a dimension: a view."""
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank])


def exchange_rows(
    x: torch.Tensor, rows: Sequence[int], columns: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """From some columns of all ranks' rows to all columns of this rank's rows.

    Args:
        x: [sum(rows), columns[rank]].
        rows: The number of rows of each rank.
        columns: The number of columns of each rank.
        group: The ranks.

    Returns:
        [rows[rank], sum(columns)].
    """
    rank = dist.get_rank(group)
    mine = rows[rank]
    received = x.new_empty(mine * sum(columns))
    dist.all_to_all_single(
        received,
        x.contiguous().view(-1),
        output_split_sizes=[mine * width for width in columns],
        input_split_sizes=[count * columns[rank] for count in rows],
        group=group,
    )
    parts = torch.split(received, [mine * width for width in columns])
    return torch.cat([part.view(mine, width) for part, width in zip(parts, columns, strict=True)], dim=1)


def exchange_columns(
    x: torch.Tensor, rows: Sequence[int], columns: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """The way back of `exchange_rows`: from [rows[rank], sum(columns)] to [sum(rows), columns[rank]]."""
    rank = dist.get_rank(group)
    sent = torch.cat([part.reshape(-1) for part in torch.split(x, list(columns), dim=1)])
    received = x.new_empty(sum(rows) * columns[rank])
    dist.all_to_all_single(
        received,
        sent,
        output_split_sizes=[count * columns[rank] for count in rows],
        input_split_sizes=[rows[rank] * width for width in columns],
        group=group,
    )
    return received.view(sum(rows), columns[rank])
