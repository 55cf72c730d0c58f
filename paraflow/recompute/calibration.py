"""Measures a model's blocks on a batch, and chooses what becomes of each: the same on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paraflow.errors import PlanError
from paraflow.parts import is_spread, local
from paraflow.plan_memory import bytes_of
from paraflow.planner.blocks import Profile
from paraflow.planner.recomputation import Costs, Cut, choose
from paraflow.profiler import free_memory

if TYPE_CHECKING:
    from paraflow.data.batch import Batch
    from paraflow.engine import Engine

_USABLE = 0.9
"""How much of a device's memory a plan may count on: the rest goes to fragments and libraries."""

_PROBED = 2**26


def choose_treatments(
    engine: Engine,
    blocks: Mapping[str, nn.Module],
    run: Callable[[], Any],
    context: AbstractContextManager[Any],
    batch: Batch,
) -> Cut:
    """Chooses what becomes of each block's activations, to meet the memory budget at the least time.

    Args:
        engine: The engine; its plan has the budget.
        blocks: The blocks by name.
        run: Runs forward and loss of the batch's first micro-batch.
        context: What forward is run in.
        batch: This rank's share of the batch.

    Raises:
        PlanError: No choice meets the budget; raised on every rank alike.
    """
    from paraflow.profiler.blocks import measure

    profile, state, budget = _agreed(
        engine, measure(engine.module, blocks, run, context), model_state(engine, blocks), _budget(engine)
    )
    link = _link_speed(engine.mesh.device)
    cut = choose(
        profile,
        budget,
        costs=Costs(link=None if link is None else engine.mesh.broadcast(link)),
        model_state=state,
        samples=max(1, max(batch.shares) // len(batch.micro_batches)),
        accumulate=engine.plan.accumulate,
    )
    if engine.mesh.any(cut.unmet is not None):
        raise PlanError(f"activation_checkpointing='auto': {cut.unmet or 'The budget of another rank cannot be met.'}")
    return cut


def model_state(engine: Engine, blocks: Mapping[str, nn.Module]) -> int:
    """Returns the bytes that the model takes on this rank's device besides its activations.

    Parameters, buffers, gradients and the optimizer's state; where parameters are sharded also what is gathered at
    once: two blocks and one block's gradients.
    """
    device = engine.mesh.device.type
    held = [local(tensor) for tensor in (*engine.module.parameters(), *engine.module.buffers())]
    trained = [local(parameter) for parameter in engine.parameters]
    own = sum(tensor.nbytes for tensor in (*held, *trained) if tensor.device.type == device)
    return own + _optimizer_bytes(engine.optimizer, device) + _gathered_bytes(engine, blocks)


def _gathered_bytes(engine: Engine, blocks: Mapping[str, nn.Module]) -> int:
    if not any(is_spread(parameter) for parameter in engine.module.parameters()):
        return 0
    sizes = [sum(p.numel() * p.element_size() for p in block.parameters()) for block in blocks.values()]
    whole = sum(p.numel() * p.element_size() for p in engine.module.parameters())
    return whole if engine.plan.zero < 3 else 3 * max(sizes, default=0)


def _optimizer_bytes(optimizer: torch.optim.Optimizer, device: str) -> int:
    """The state that is there, and for parameters that have none yet what the optimizer will make."""
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            held = local(parameter)
            if held.device.type != device:
                continue
            there = [local(value) for value in optimizer.state.get(parameter, {}).values() if torch.is_tensor(value)]
            total += sum(value.nbytes for value in there) if there else held.nbytes * _slots(group)
    return total


def _slots(group: Mapping[str, Any]) -> int:
    """Tensors of a parameter's shape that an optimizer keeps for it, told by its options."""
    if "betas" in group:
        return 2 + bool(group.get("amsgrad"))
    averages = "alpha" in group or "rho" in group or "lr_decay" in group
    return int(averages) + bool(group.get("momentum")) + bool(group.get("centered"))


def _budget(engine: Engine) -> int:
    if engine.plan.memory_budget is not None:
        return bytes_of(engine.plan.memory_budget)
    device = engine.mesh.device
    if device.type == "cuda":
        return int(_USABLE * (free_memory(device) + torch.cuda.memory_reserved(device)))
    held = sum(local(tensor).nbytes for tensor in (*engine.module.parameters(), *engine.module.buffers()))
    return int(_USABLE * free_memory(device)) + held


def _agreed(engine: Engine, profile: Profile, state: int, budget: int) -> tuple[Profile, int, int]:
    """The largest figures and the smallest budget of all ranks; of parts that differ each rank has its own."""
    mesh = engine.mesh
    if mesh.world_size == 1:
        return profile, state, budget
    size = torch.tensor([len(profile.numbers())])
    figures = [float(state), float(-budget)]
    alike = len({int(one) for one in mesh.all_gather(size)}) == 1
    if alike:
        figures += profile.numbers()
    largest = torch.stack(mesh.all_gather(torch.tensor(figures, dtype=torch.float64))).amax(0).tolist()
    return profile.with_numbers(largest[2:]) if alike else profile, int(largest[0]), int(-largest[1])


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
