"""Makes the engine of a model: plan, ranks, and micro-batches that fit in memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from paraflow.data import Source
from paraflow.data.batch import count_rows, to_device
from paraflow.engine import Engine
from paraflow.mesh import Mesh
from paraflow.models.task import Task
from paraflow.plan import Plan
from paraflow.planner import Choice, Footprint, choose_accumulation
from paraflow.profiler import activation_bytes, free_memory
from paraflow.resolve import Request, resolve

_MEASURED_SAMPLES = 2


def build_engine(task: Task, request: Request, device: torch.device, source: Source) -> tuple[Engine, list[Choice]]:
    """Makes the engine of a model.

    Args:
        task: The model.
        request: What was asked for.
        device: The device of this rank.
        source: The data, which ``auto`` measures the model on.

    Returns:
        The engine, and what ``auto`` chose.

    Raises:
        PlanError: The plan is refused.
        ModelError: The model has nothing to train.
    """
    resolved = resolve(request, device, source.batch_size)
    mesh = Mesh(resolved.plan, device)
    choices = resolved.choices
    if request.auto and "accumulate" not in request.fields():
        fitting = _fit_micro_batches(task, resolved.plan, mesh, source)
        choices = [*choices, fitting]
        if fitting.value > 1:
            flags = {**request.flags, "accumulate": fitting.value}
            resolved = resolve(replace(request, flags=flags), device, source.batch_size)
            mesh.plan = resolved.plan
    return Engine(task, mesh, resolved.plugins), choices


def _fit_micro_batches(task: Task, plan: Plan, mesh: Mesh, source: Source) -> Choice:
    """Chooses the accumulation; every rank the same, by the one with the least memory."""
    sample = getattr(source, "sample", None)
    if source.batch_size is None or sample is None:
        return Choice("accumulate", 1, "batches come ready-made")
    if plan.world_size > plan.dp:
        return Choice("accumulate", 1, "the model is spread over ranks, so one rank cannot measure it")
    task.module.to(mesh.device)
    batch = to_device(sample(_MEASURED_SAMPLES), mesh.device)
    footprint = Footprint(
        parameters=sum(parameter.numel() for parameter in task.module.parameters()),
        activations=activation_bytes(task.module, task.training_step, batch, _precision(plan, mesh))
        // count_rows(batch),
        free=free_memory(mesh.device),
    )
    share = -(-min(source.batch_size, _samples(source)) // mesh.data_ranks)
    mine = choose_accumulation(footprint, share)
    steps = int(max(mesh.all_gather(torch.tensor([mine.value], device=mesh.device))).item())
    return mine if steps == mine.value else Choice("accumulate", steps, "the rank with the least free memory needs it")


def _samples(source: Source) -> int:
    """An upper bound on the samples of an epoch."""
    return (source.length or 1) * (source.batch_size or 1)


def _precision(plan: Plan, mesh: Mesh) -> AbstractContextManager[Any]:
    if plan.precision == "fp32":
        return nullcontext()
    return torch.autocast(mesh.device.type, dtype=torch.bfloat16 if plan.precision == "bf16" else torch.float16)
