"""Copies the next batch to the device while the current one is computed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from paraflow.data.batch import Batch, MicroBatch, map_tensors, to_device


def on_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yields the batches with their tensors on the device, copied ahead where the device can.

    On CUDA each batch is put in pinned memory and copied on a stream of its own while the step before it runs. On
    other accelerators it is copied when its turn comes; on the CPU nothing is copied at all.
    """
    if device.type == "cpu":
        return batches
    if device.type == "cuda":
        return _copied_ahead(batches, device)
    return (_moved(batch, device) for batch in batches)


def _moved(batch: Batch, device: torch.device) -> Batch:
    batch.micro_batches = [MicroBatch(to_device(micro.data, device), micro.samples) for micro in batch.micro_batches]
    return batch


def _copied_ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start_copy() -> Batch | None:
        batch = next(batches, None)
        if batch is None:
            return None
        for micro in batch.micro_batches:
            micro.data = map_tensors(lambda tensor: tensor if tensor.is_cuda else tensor.pin_memory(), micro.data)
        with torch.cuda.stream(stream):
            return _moved(batch, device)

    ahead = start_copy()
    while ahead is not None:
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        batch = ahead
        for micro in batch.micro_batches:
            # Without this the allocator may hand the memory to the copy stream while the step still reads it.
            map_tensors(partial(_used_on, stream=current), micro.data)
        ahead = start_copy()
        yield batch


def _used_on(tensor: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    if tensor.is_cuda:
        tensor.record_stream(stream)
    return tensor
