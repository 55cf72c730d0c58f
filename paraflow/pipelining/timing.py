"""How long each unit of a model takes, measured: what stages are balanced by where estimates will not do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paraflow.data.batch import map_tensors
from paraflow.data.order import preserved_random_state
from paraflow.models.task import Task
from paraflow.pipelining.cut import Unit, units_of


def unit_seconds(model: nn.Module, batch: Any, *, stages: Sequence[str] = (), repeats: int = 3) -> dict[str, float]:
    """Measures the forward of each unit of a model on a micro-batch, on the device that the model is on.

    The model's training step is run without gradients; a unit's backward takes about twice as long as its forward, so
    the shares are those of both. Weights, buffers and random generators are afterwards as they were.

    Args:
        model: The model.
        batch: A micro-batch as its step takes it, on the model's device.
        stages: Module names that stages will begin with, if they are to be said.
        repeats: How often it is run; the least time of each unit counts.

    Returns:
        Seconds by the name of the unit: the ``costs`` of `paraflow.plugins.Pipeline`.

    Example:
        >>> from paraflow.models import configure
        >>> net = configure(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), loss="mse")
        >>> list(unit_seconds(net, (torch.ones(2, 4), torch.ones(2, 2))))
        ['0', '2']
    """
    units = units_of(model, stages)
    task = Task(model)
    least = dict.fromkeys([unit.name for unit in units], float("inf"))
    state = {name: tensor.clone() for name, tensor in model.named_buffers()}
    with preserved_random_state(), torch.random.fork_rng(), torch.no_grad():
        for _ in range(repeats):
            with _timed(units) as spent:
                task.training_step(map_tensors(torch.clone, batch))
            least = {name: min(seconds, spent[name]) for name, seconds in least.items()}
        for name, buffer in model.named_buffers():
            buffer.copy_(state[name])
    return least


@contextmanager
def _timed(units: Sequence[Unit]) -> Iterator[dict[str, float]]:
    """Gives the seconds that each unit has run for, filled in while the block runs."""
    spent = dict.fromkeys([unit.name for unit in units], 0.0)
    begun: dict[str, float] = {}

    def before(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            begun[name] = _now(module)

        return hook

    def after(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            spent[name] += _now(module) - begun[name]

        return hook

    handles = [unit.module.register_forward_pre_hook(before(unit.name)) for unit in units]
    handles += [unit.module.register_forward_hook(after(unit.name)) for unit in units]
    try:
        yield spent
    finally:
        for handle in handles:
            handle.remove()


def _now(module: nn.Module) -> float:
    parameter = next(module.parameters(), None)
    if parameter is not None and parameter.is_cuda:
        torch.cuda.synchronize(parameter.device)
    return time.perf_counter()
