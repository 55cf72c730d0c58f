"""Trains a model under its plan and on one process, on the same batches, and compares.

every rank:  train a copy under the plan
rank 0:      train a copy alone, from the same weights
every rank:  compare its own parameters with rank 0's, one at a time
"""

from __future__ import annotations

import copy
import json
import math
import random
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from paraflow.callbacks.base import Callback
from paraflow.engine import Engine
from paraflow.errors import DataError, ParaflowError
from paraflow.launch.environment import alone
from paraflow.mesh import Mesh
from paraflow.parts import is_spread, local, part_for
from paraflow.resolve import Request
from paraflow.verification.dropout import without_dropout
from paraflow.verification.report import BOUNDS, PARAMETER_BOUNDS, Measured, Verification

if TYPE_CHECKING:
    from paraflow.trainer import Trainer

_SAME_MATHEMATICS = ("precision", "clip_norm")
_ROUNDING = {"fp32": 1e-5, "fp16": 1e-3, "bf16": 1e-2}


class _Recorder(Callback):
    """Notes the loss and the gradient norm of each step, how large gradients become, and whether a step draws."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.gradients: dict[str, torch.Tensor] = {}
        self.draws = False

    def on_step_begin(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Notes where the generators are."""
        self._generators = _generators()

    def on_before_optimizer_step(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Notes how large each gradient is, of the parameters that this rank holds whole."""
        self.draws |= _generators() != self._generators
        for name, parameter in trainer.engine.module.named_parameters():
            if parameter.grad is not None and not is_spread(parameter):
                size = parameter.grad.detach().abs()
                self.gradients[name] = torch.maximum(self.gradients[name], size) if name in self.gradients else size

    def on_step_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Notes loss and norm."""
        self.losses.append(logs["loss"])
        if "grad_norm" in logs:
            self.norms.append(logs["grad_norm"])

    @property
    def measured(self) -> Measured:
        """What was noted."""
        return Measured(self.losses, self.norms)


def _generators() -> tuple[Any, ...]:
    """The states of the generators that a step may draw from."""
    kept = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]
    return (*(bytes(state.tolist()) for state in kept), random.getstate(), repr(np.random.get_state(legacy=False)))


def verify(
    trainer: Trainer, model: nn.Module, data: Any, steps: int = 5, batch_size: int | None = None
) -> Verification:
    """Compares a model's training under the plan with that on one process: a collective. The model stays as it is.

    Args:
        trainer: Says the plan, the seed and the device; nothing of it changes.
        model: The model; copies of it are trained. Rank 0 needs memory for the whole of it.
        data: What `fit` takes, but for what can be read only once.
        steps: Optimizer steps to compare.
        batch_size: Samples of one step over all ranks.

    Raises:
        DataError: The data can be read only once.
        ParaflowError: The training on one process raised.
    """
    if isinstance(data, Iterator):
        raise DataError(
            "verify reads the data twice, and was given an iterator, which can be read once. Give arrays, a dataset, a "
            "DataLoader, a list of batches, or a function that returns an iterator."
        )
    reference, planned = copy.deepcopy(model), copy.deepcopy(model)
    before = {name: value.detach().clone() for name, value in reference.named_parameters() if not value.is_meta}
    with without_dropout() as mode:
        task = _Task(trainer, data, steps, batch_size)
        mine = task.train(planned, _measuring(trainer.request))
        engine = mine.engine
        text, significant = _alone(task, engine, reference)
    said = json.loads(engine.mesh.gather_texts(text)[0])
    if "failure" in said:
        raise ParaflowError(f"The training on one process, to compare with, raised on rank 0: {said['failure']}")
    return Verification(
        plan=str(engine.plan if trainer.request.fields().get("clip_norm") else engine.plan.with_fields(clip_norm=None)),
        planned=mine.recorder.measured,
        alone=Measured(said["losses"], said["norms"] if mine.recorder.norms else []),
        parameters=_compared(engine, dict(reference.named_parameters()), before, significant),
        noise=tuple(said["noise"]),
        bound=max(BOUNDS[name] for name in _precisions(engine)),
        parameter_bound=max(PARAMETER_BOUNDS[name] for name in _precisions(engine)),
        without_dropout=mode.seen,
        draws=said["draws"],
        note=_note(engine),
    )


@dataclass(frozen=True)
class _Trained:
    """A training that is done."""

    engine: Engine
    recorder: _Recorder


@dataclass(frozen=True)
class _Task:
    """What is trained, under whatever plan."""

    trainer: Trainer
    data: Any
    steps: int
    batch_size: int | None

    def train(self, model: nn.Module, request: Request) -> _Trained:
        recorder = _Recorder()
        trainer = type(self.trainer)(
            **request.flags,
            plugins=request.plugins,
            plan=request.plan,
            auto=request.auto,
            max_steps=self.steps,
            seed=self.trainer.seed,
            device=self.trainer.device,
            callbacks=[recorder],
            progress=False,
        )
        trainer.fit(model, self.data, batch_size=self.batch_size)
        return _Trained(trainer.engine, recorder)


def _alone(task: _Task, engine: Engine, model: nn.Module) -> tuple[str, dict[str, torch.Tensor]]:
    """Trains on rank 0 as if there were no other.

    Returns:
        What was measured, or why it failed, as JSON; and which elements of each parameter have a gradient that is more
        than rounding.
    """
    if engine.mesh.rank != 0:
        return "{}", {}
    try:
        with alone():
            done = task.train(model, _of_one_device(engine, task.trainer.request))
    except Exception as error:
        traceback.print_exc()
        return json.dumps({"failure": f"{type(error).__name__}: {error}"}), {}
    model.to("cpu")
    recorder = done.recorder
    significant = _significant(recorder.gradients, max(_ROUNDING[name] for name in _precisions(engine)))
    noise = [name for name, elements in significant.items() if elements.numel() and not elements.any()]
    said = {"losses": recorder.losses, "norms": recorder.norms, "noise": noise, "draws": recorder.draws}
    return json.dumps(said), significant


def _significant(gradients: Mapping[str, torch.Tensor], rounding: float) -> dict[str, torch.Tensor]:
    """Which elements have a gradient that is more than rounding beside those of their layer.

    Adam divides by a gradient's size, so it makes as large a step of rounding as of anything: the biases of attention's
    keys, whose gradient is zero, go anywhere. Elements whose gradient is exactly zero count: they do not move.
    """
    layers: dict[str, float] = {}
    for name, size in gradients.items():
        layer = name.rpartition(".")[0]
        layers[layer] = max(layers.get(layer, 0.0), float(size.max()) if size.numel() else 0.0)
    return {
        name: ((size == 0) | (size > rounding * layers[name.rpartition(".")[0]])).cpu()
        for name, size in gradients.items()
    }


def _measuring(request: Request) -> Request:
    """The same request, with the gradient norm measured where it can be."""
    fields = request.fields()
    if "clip_norm" in fields or fields.get("apply_groups") == "backward":
        return request
    return Request({**request.flags, "clip_norm": math.inf}, request.plugins, request.plan, request.auto)


def _of_one_device(engine: Engine, request: Request) -> Request:
    """What changes what is computed, and nothing of how it is laid out; plugins that stand for no field stay."""
    fields = {name: getattr(engine.plan, name) for name in _SAME_MATHEMATICS}
    kept = [plugin for plugin in request.plugins if not plugin.provides and not plugin.fields]
    said = {name: value for name, value in fields.items() if value is not None}
    return _measuring(Request(said, kept))


def _compared(
    engine: Engine,
    expected: Mapping[str, torch.Tensor],
    before: Mapping[str, torch.Tensor],
    significant: Mapping[str, torch.Tensor],
) -> dict[str, float]:
    """How far each parameter is from rank 0's, as a share of the way that it has come: a collective.

    One that no rank holds is infinitely far.
    """
    state = engine.model_state()
    mine: dict[str, tuple[float, float]] = {}
    for name in sorted(expected):
        after = _from_first(engine.mesh, expected[name])
        began = _from_first(engine.mesh, before.get(name, torch.zeros(after.shape, dtype=after.dtype)))
        counts = significant.get(name, torch.ones(expected[name].shape, dtype=torch.bool))
        counts = _from_first(engine.mesh, counts.to(torch.uint8))
        if isinstance(state.get(name), torch.Tensor):
            mine[name] = _apart(state[name], after, began, counts)
    apart, way = dict.fromkeys(expected, 0.0), dict.fromkeys(expected, 0.0)
    held: set[str] = set()
    for text in engine.mesh.gather_texts(json.dumps(mine)):
        for name, (difference, distance) in json.loads(text).items():
            held.add(name)
            apart[name] += difference
            way[name] += distance
    shares = {name: math.sqrt(apart[name] / way[name]) if way[name] else math.sqrt(apart[name]) for name in apart}
    return {name: share if name in held else math.inf for name, share in shares.items()}


def _from_first(mesh: Mesh, expected: torch.Tensor) -> torch.Tensor:
    """Rank 0's value of a tensor, on every rank, on the host."""
    if mesh.world_size == 1:
        return expected.detach().cpu()
    mine = expected.detach() if mesh.rank == 0 else torch.empty(expected.shape, dtype=expected.dtype)
    return mesh.broadcast_tensor(mine.to(mesh.device)).cpu()


def _apart(
    value: torch.Tensor, expected: torch.Tensor, before: torch.Tensor, counts: torch.Tensor
) -> tuple[float, float]:
    """The squared differences of what this rank holds, summed, and the squared way that it has come.

    What storing a value rounds is no difference: beside a short way from a large value it would look like one.
    """
    held = local(value.detach()).cpu().double()
    after, counted = _same_part(expected, value), _same_part(counts, value)
    started = _same_part(before, value)
    stored = torch.finfo(value.dtype).eps * after.abs() if value.is_floating_point() else 0.0
    difference = ((held - after).abs() - stored).clamp(min=0)
    return float((counted * difference**2).sum()), float((counted * (after - started) ** 2).sum())


def _same_part(whole: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    part = local(part_for(_Whole(whole), value)) if is_spread(value) else whole
    return part.detach().cpu().double()


class _Whole:
    """A whole tensor on this rank, of which a box can be taken."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.shape = tensor.shape

    def __getitem__(self, box: Any) -> torch.Tensor:
        return self._tensor[box]


def _precisions(engine: Engine) -> set[str]:
    return {engine.plan.precision, engine.plan.comm_hook or "fp32"}


def _note(engine: Engine) -> str:
    statistics = any(getattr(layer, "track_running_stats", False) for layer in engine.module.modules())
    if not statistics or engine.plan.data_ranks * engine.plan.accumulate == 1:
        return ""
    return (
        "Batch normalisation sees one micro-batch of one rank at a time, so this model trains differently in smaller "
        "parts; group or layer normalisation does not."
    )
