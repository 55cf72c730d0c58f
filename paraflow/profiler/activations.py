"""Measures what a step keeps for its backward, without running one."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from paraflow.buffers import Buffers
from paraflow.launch.environment import local_world_size


def activation_bytes(
    module: nn.Module, step: Callable[[Any], Any], batch: Any, context: AbstractContextManager[Any] | None = None
) -> int:
    """Returns the bytes that a step's forward keeps for backward, parameters left out.

    The module and the random state are as before: buffers that forward changes are put back.

    Args:
        module: The module that the step runs.
        step: From a batch to a loss.
        batch: A micro-batch on the module's device.
        context: What forward is run in, such as autocast.
    """
    own = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    seen: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    buffers = Buffers(module)
    buffers.keep()
    devices = [tensor.device for tensor in module.parameters() if tensor.is_cuda][:1]
    modes = [(layer, layer.training) for layer in module.modules()]
    if not module.training:  # parts that were set to evaluation by themselves stay so
        module.train()
    try:
        with (
            torch.random.fork_rng(devices),
            torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
            context or nullcontext(),
        ):
            # Kept until all is counted: freed memory would be handed out, and counted, again.
            returned = step(batch)
            del returned
    finally:
        for layer, training in modes:
            layer.training = training
        buffers.put_back()
    return sum(seen.values())


def free_memory(device: torch.device) -> int:
    """Returns the free bytes of a device, or, on the host, this rank's part of what is free there."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        available = 4 * 1024**3
    return available // local_world_size()
