"""Measures a model's blocks on a batch, and chooses what becomes of each: the same on every rank."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paraflow.data.batch import count_rows, take_rows
from paraflow.errors import ModelError, PlanError
from paraflow.plan_memory import bytes_of
from paraflow.planner.recomputation import Costs, Cut, choose
from paraflow.profiler import free_memory
from paraflow.recompute.agreement import agreed, largest
from paraflow.recompute.standing import standing

if TYPE_CHECKING:
    from paraflow.data.batch import Batch
    from paraflow.engine import Engine

_USABLE = 0.9
"""How much of a device's memory a plan may count on: the rest goes to fragments and libraries."""

_PROBED = 2**26


def choose_treatments(
    engine: Engine,
    blocks: Mapping[str, nn.Module],
    run: Callable[[Any], Any],
    context: Callable[[], AbstractContextManager[Any]],
    batch: Batch,
) -> Cut:
    """Chooses what becomes of each block's activations, to meet the memory budget at the least time.

    Args:
        engine: The engine; its plan has the budget.
        blocks: The blocks by name.
        run: Runs forward and loss on a micro-batch's data.
        context: Makes what forward is run in.
        batch: This rank's share of the batch.

    Raises:
        PlanError: No choice meets the budget; raised on every rank alike.
    """
    choices = _Choices(engine, blocks, run, context)
    data, count = batch.micro_batches[0].data, len(batch.micro_batches)
    cut = choices.of(data, count)
    if cut.unmet is not None:
        advice = [*_smaller(choices, data, batch), *_on_more_ranks(choices, cut, count)]
        raise PlanError(f"activation_checkpointing='auto': {' '.join([cut.unmet, *advice])}")
    return cut


class _Choices:
    """What would be chosen for micro-batches of different sizes: the same on all ranks, which measure in step."""

    def __init__(
        self,
        engine: Engine,
        blocks: Mapping[str, nn.Module],
        run: Callable[[Any], Any],
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.engine = engine
        self._blocks, self._run, self._context = blocks, run, context
        self._standing = functools.cache(functools.partial(standing, engine))
        self.budget = -largest(engine.mesh, -_budget(engine, self._standing(1).there))
        link = _link_speed(engine.mesh.device)
        self._costs = Costs(link=None if link is None else engine.mesh.broadcast(link))

    def state(self, accumulate: int) -> int:
        """The most that the model's state takes on a rank, in a step of so many micro-batches."""
        state = self._standing(accumulate)
        return largest(self.engine.mesh, max(state.running, state.applying))

    def of(self, data: Any, accumulate: int) -> Cut:
        """Measures a micro-batch's data, and chooses for a step of so many."""
        from paraflow.profiler.blocks import measure

        mesh = self.engine.mesh
        state = self._standing(accumulate)
        profile = measure(
            self.engine.module,
            self._blocks,
            lambda: self._run(data),
            self._context(),
            gradients_there=accumulate > 1,
        )
        return choose(
            agreed(mesh, profile, self.engine.say),
            self.budget,
            costs=self._costs,
            model_state=largest(mesh, state.running),
            applying=largest(mesh, state.applying),
        )


def _smaller(choices: _Choices, data: Any, batch: Batch) -> list[str]:
    """The fewest micro-batches, doubled each time, that meet the budget: measured, for not all goes by samples."""
    engine, count = choices.engine, len(batch.micro_batches)
    if engine.plan.apply_groups == "backward":  # takes one micro-batch
        return []
    rows, samples = count_rows(data), -(-max(batch.shares) // count)
    least = 2 if any(getattr(layer, "track_running_stats", False) for layer in engine.module.modules()) else 1
    times = 2
    while samples // times >= least and choices.state(times * count) <= choices.budget:
        part = take_rows(data, 0, max(least, -(-rows // times)), rows)
        if choices.of(part, times * count).unmet is None:
            return [f"Or write accumulate={times * count}, for micro-batches of {-(-samples // times)} samples."]
        times *= 2
    return []


def _on_more_ranks(choices: _Choices, cut: Cut, count: int) -> list[str]:
    """Sharding, where the model's state is what is too much, and is not sharded yet."""
    from paraflow.plugins.gathered import gathered_bytes
    from paraflow.plugins.units import find_units, rest_of

    engine, state = choices.engine, choices.state(count)
    if engine.partition_dims:
        return []
    try:
        units = find_units(engine.module)
        rest = rest_of(engine.module, units)
    except ModelError:  # it cannot be sharded
        return []
    for ranks in [engine.mesh.world_size] if engine.mesh.world_size > 1 else [2, 4, 8, 16]:
        needs = gathered_bytes(units, rest, shards=ranks, lets_go=True, reduced_each=True)
        if state // ranks + needs.held + cut.smallest - state <= choices.budget:
            return [f"Or write fsdp={ranks} {_where(engine, ranks)}."]
    return []


def _where(engine: Engine, ranks: int) -> str:
    return f"on {ranks} ranks" if engine.mesh.world_size == 1 else "in place of the other degrees"


def _budget(engine: Engine, there: int) -> int:
    if engine.plan.memory_budget is not None:
        return bytes_of(engine.plan.memory_budget)
    device = engine.mesh.device
    if device.type == "cuda":
        # What torch has reserved holds what is there already, and what it would hand out again.
        return int(_USABLE * (free_memory(device) + torch.cuda.memory_reserved(device)))
    return int(_USABLE * free_memory(device)) + there


def _link_speed(device: torch.device) -> float | None:
    """Bytes a second between the host and a device, or None where there is no way between them."""
    if device.type != "cuda":
        return None
    there = torch.empty(_PROBED, dtype=torch.uint8, device=device)
    here = torch.empty(_PROBED, dtype=torch.uint8, pin_memory=True)
    here.copy_(there, non_blocking=True)
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    here.copy_(there, non_blocking=True)
    torch.cuda.synchronize(device)
    return _PROBED / (time.perf_counter() - began)
