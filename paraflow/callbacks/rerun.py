"""Running a model's forward again for a look at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from paraflow.buffers import Buffers
from paraflow.data.order import preserved_random_state
from paraflow.plugins.precision import DTYPES

if TYPE_CHECKING:
    from paraflow.engine import Engine


@contextmanager
def undisturbed(engine: Engine) -> Iterator[None]:
    """Runs a block that may run forward; buffers, modes and random state are afterwards what they were.

    Inside, a compiled module runs as it is written, so that hooks on its parts are called.
    """
    module, device = engine.module, engine.mesh.device
    modes = [(part, part.training, part._compiled_call_impl) for part in module.modules()]
    buffers = Buffers(module)
    buffers.keep()
    for part, _, _ in modes:
        part._compiled_call_impl = None
    try:
        with preserved_random_state(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for part, training, compiled in modes:
            part.training, part._compiled_call_impl = training, compiled
        buffers.put_back()


def forward_again(engine: Engine, data: Any) -> Any:
    """Returns what the training step gives for a micro-batch, outside of a step: no plugin prepares a backward.

    Where a plan spreads parameters over ranks its plugins make the model whole, and every rank calls this alike.
    """
    if engine.partition_dims:
        return engine.forward(data)
    if engine.plan.precision == "fp32":
        return engine.task.training_step(data)
    with torch.autocast(engine.mesh.device.type, dtype=DTYPES[engine.plan.precision]):
        return engine.task.training_step(data)
