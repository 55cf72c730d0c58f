"""Makes the engine of a model: plan, ranks, and micro-batches that fit in memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from paraflow.data import Source
from paraflow.data.batch import count_rows, map_tensors, to_device
from paraflow.engine import Engine
from paraflow.errors import DataError, ParaflowError, PlanError
from paraflow.mesh import Mesh
from paraflow.models.task import Task
from paraflow.planner import Choice, Footprint, choose_accumulation
from paraflow.plugins.base import Plugin
from paraflow.plugins.precision import DTYPES
from paraflow.profiler import activation_bytes, free_memory
from paraflow.profiler.attempt import attempt
from paraflow.resolve import Request, facts, resolve
from paraflow.rules import check

_MEASURED_SAMPLES = 2

Choices = list[Choice]


def build_engine(task: Task, request: Request, device: torch.device, batch_size: int | None) -> tuple[Engine, Choices]:
    """Makes the engine of a model.

    Args:
        task: The model.
        request: What was asked for.
        device: The device of this rank.
        batch_size: Samples of a step over all ranks; None where batches come ready-made, or nothing is trained.

    Returns:
        The engine, and what ``auto`` chose.

    Raises:
        PlanError: The plan is refused, before any process group is started, what the model's scopes ask for included;
            or the ranks were given different ones.
        ModelError: The model has nothing to train.
    """
    resolved = resolve(request.with_scopes(task.module, device), device, batch_size)
    mesh = Mesh(resolved.plan, device)
    _require_same_plugins(mesh, resolved.plugins)
    return Engine(task, mesh, resolved.plugins), resolved.choices


def _require_same_plugins(mesh: Mesh, plugins: Sequence[Plugin]) -> None:
    """Each may have collectives of its own."""
    names = mesh.gather_texts(", ".join(plugin.name for plugin in plugins))
    other = next((rank for rank, given in enumerate(names) if given != names[0]), None)
    if other is not None:
        raise PlanError(
            f"The ranks were given different plugins: rank 0 has {names[0] or 'none'}, and rank {other} has "
            f"{names[other] or 'none'}. Give every rank the same."
        )


def require_same(engine: Engine, callbacks: int, source: Source) -> None:
    """Refuses ranks that were given different callbacks or data: their collectives would not match.

    Raises:
        ParaflowError: The callbacks differ.
        DataError: The data differs, as far as that shows without reading it all.
    """
    if not engine.mesh.agrees(callbacks):
        raise ParaflowError(
            "The ranks were given different callbacks (or progress). Give every rank the same, and let a callback act "
            "on trainer.is_main only."
        )
    signature = getattr(source, "signature", None)
    if signature is not None and not engine.mesh.agrees(signature()):
        raise DataError(
            "The ranks were given different training data. Give every rank all of it, in the same order; each reads "
            "its share (call pf.seed(0) before making random data). For streams that differ there is pf.data.PerRank."
        )


def require_batch(engine: Engine, batch_size: int | None) -> None:
    """Refuses a batch that an engine's plan cannot divide; what ``auto`` chose for another batch is forgotten.

    Raises:
        PlanError: It is too small for the ranks or micro-batches.
    """
    engine.plan = engine.mesh.plan
    check(facts(engine.plan, engine.plugins, engine.mesh.device, batch_size))


def fit_micro_batches(engine: Engine, request: Request, source: Source) -> Choices:
    """Under ``auto``, chooses the accumulation with which micro-batches fit in memory, and gives it to the engine.

    Every rank chooses the same, by the one with the least memory.
    """
    if not request.chooses("accumulate") or engine.mesh.plan.accumulate > 1:  # the model's scopes said it
        return []
    choice = _choose(engine, source)
    if choice.value != engine.plan.accumulate:
        engine.plan = engine.plan.with_fields(accumulate=choice.value)
    return [choice]


def _choose(engine: Engine, source: Source) -> Choice:
    mesh, task = engine.mesh, engine.task
    sample = getattr(source, "sample", None)
    if source.batch_size is None or sample is None:
        return Choice("accumulate", 1, "batches come ready-made")
    if engine.partition_dims or engine.plan.world_size > engine.plan.dp:
        return Choice("accumulate", 1, "the model is spread over ranks, so one rank cannot measure it")
    # A copy: a view of the whole data would be counted as kept, whole.
    batch = map_tensors(torch.clone, to_device(sample(_MEASURED_SAMPLES), mesh.device))
    rows = count_rows(batch)  # the step may take the batch apart
    share = -(-min(source.batch_size, _samples(source)) // mesh.data_ranks)
    kept = attempt(lambda: activation_bytes(task.module, task.training_step, batch, _precision(engine)), mesh.device)
    mine = (
        Choice("accumulate", share, f"{_MEASURED_SAMPLES} samples at once do not fit in memory")
        if kept is None
        else _by_footprint(engine, kept // rows, share)
    )
    steps = max(int(value) for value in mesh.all_gather(torch.tensor([mine.value], device=mesh.device)))
    return mine if steps == mine.value else Choice("accumulate", steps, "the rank with the least free memory needs it")


def _by_footprint(engine: Engine, activations: int, share: int) -> Choice:
    """What the planner chooses for so many bytes of activations a sample."""
    footprint = Footprint(
        parameters=sum(parameter.numel() for parameter in engine.task.module.parameters()),
        activations=activations,
        free=free_memory(engine.mesh.device),
    )
    return choose_accumulation(footprint, share)


def _samples(source: Source) -> int:
    """An upper bound on the samples of an epoch."""
    return (source.length or 1) * (source.batch_size or 1)


def _precision(engine: Engine) -> AbstractContextManager[Any]:
    dtype = DTYPES.get(engine.plan.precision)
    return nullcontext() if dtype is None else torch.autocast(engine.mesh.device.type, dtype=dtype)
