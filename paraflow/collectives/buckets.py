"""Collectives over lists of tensors, a bucket at a time: fewer messages, and bounded extra memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist


def average(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, bucket_bytes: int, dtype: torch.dtype | None = None
) -> None:
    """Replaces each tensor by its mean over a group's ranks, in place; every rank gives tensors of the same shapes.

    Args:
        tensors: Dense tensors.
        group: The ranks.
        bucket_bytes: How much is sent at once.
        dtype: What is rounded to and summed in, where it is not the tensors' own.
    """
    ranks = dist.get_world_size(group)
    for bucket in buckets_of(tensors, bucket_bytes):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        flat = (flat if dtype is None else flat.to(dtype)).div_(ranks)
        dist.all_reduce(flat, group=group)
        _unpack(flat, bucket)


def add_up(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, bucket_bytes: int) -> None:
    """Replaces each tensor by its sum over a group's ranks, in place; every rank gives tensors of the same shapes."""
    for bucket in buckets_of(tensors, bucket_bytes):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(flat, group=group)
        _unpack(flat, bucket)


def broadcast(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, bucket_bytes: int, source: int | None = None
) -> None:
    """Gives every rank of a group the tensors of one of them, in place: of the first, or of the rank ``source``."""
    source = dist.get_global_rank(group, 0) if source is None else source
    for bucket in buckets_of(tensors, bucket_bytes):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        dist.broadcast(flat, source, group=group)
        if source != dist.get_rank():
            _unpack(flat, bucket)


def buckets_of(tensors: Sequence[torch.Tensor], bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Cuts a list of tensors into runs of one dtype and device, of about so many bytes each."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        other = bucket and (tensor.dtype, tensor.device) != (bucket[0].dtype, bucket[0].device)
        if bucket and (other or size + tensor.nbytes > bucket_bytes):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def _unpack(flat: torch.Tensor, bucket: Sequence[torch.Tensor]) -> None:
    parts = torch.split(flat, [tensor.numel() for tensor in bucket])
    with torch.no_grad():
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
