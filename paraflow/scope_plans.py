"""What a model's scopes ask of a plan: from the marks of `paraflow.scopes` to degrees and the options of plugins.

| scopes | on a world of several ranks |
|---|---|
| ``replica{}`` | data parallel: ``dp`` fills the world |
| ``replica{split(n)}``, or ``split(n)`` around all | ``tp=n`` for the layers in the split |
| ``replica{}``, or what no scope covers, beside ``split{}`` | these layers are split over the data ranks: `split` |
| the same beside ``split(n)`` | over n data ranks that are neighbours, with as many replicas as that gives |
| ``pipeline{stage, stage}`` | ``pp=2``; what no stage covers joins the stage before it, or the first |
| ``pipeline{stage{split(n)}, stage}`` | ``pp=2, tp=n``: each stage takes n ranks; one without a split has n copies |
| ``auto_parallel()`` | ``pp`` is the fewest stages of which each fits on a rank |

Ranks are given out in order, as the mesh lays them: stages outermost, splits innermost. A world that is a multiple of
what the scopes take holds so many replicas. One process passes the scopes over.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paraflow.errors import PlanError
from paraflow.launch.environment import local_world_size
from paraflow.plan import DATA_DEGREES, DEGREES
from paraflow.plan_memory import as_text, bytes_of
from paraflow.scope_tree import Scopes
from paraflow.scopes import Scope

_EARLIER = "_paraflow_scope_fields"
_TRAINING_BYTES = 16  # of a parameter: itself, its gradient and two moments, in fp32


def fields_of(model: nn.Module, world: int, said: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Returns what a model's scopes say of the plan; nothing on a world of one process, or where there are none.

    Args:
        model: The model.
        world: The number of ranks.
        said: The plan's fields that were said elsewhere: what is left to a scope depends on them.
        device: The device of a rank, whose memory says what fits there.

    Raises:
        PlanError: The scopes cannot stand together, or the world is no multiple of what they take.
    """
    names = {name for name, _ in model.named_parameters()}
    earlier: tuple[set[str], dict[str, Any]] | None = model.__dict__.get(_EARLIER)
    if earlier is not None and names < earlier[0]:  # an earlier plan has left other stages' parameters out
        return earlier[1]
    scopes = Scopes.of(model)
    if not scopes or world == 1:
        return {}
    fields = _fields_of(scopes, model, world, said, device)
    model.__dict__[_EARLIER] = names, fields
    return fields


def _fields_of(
    scopes: Scopes, model: nn.Module, world: int, said: Mapping[str, Any], device: torch.device
) -> dict[str, Any]:
    if scopes.all("auto_parallel"):
        return _automatic(model, world, said, device)
    fields: dict[str, Any] = {}
    options: dict[str, dict[str, Any]] = {}
    _say_pipeline(scopes, said, fields, options)
    stages = int(fields.get("pp", said.get("pp", 1)))
    _say_tensor_parallel(scopes, world, {**said, "pp": stages}, fields, options)
    _require_fitting(scopes, world, {**said, **fields})
    _say_split(scopes, world, {**said, **fields}, options)
    return {**fields, "options": options} if options else fields


def _say_pipeline(
    scopes: Scopes, said: Mapping[str, Any], fields: dict[str, Any], options: dict[str, dict[str, Any]]
) -> None:
    if not scopes.stages:
        return
    pipeline, count = scopes.all("pipeline")[0], len(scopes.stages)
    ranks = int(said.get("pp", count))
    chunks = count // ranks if count % ranks == 0 else 1
    fields["pp"] = ranks if chunks > 1 and ranks > 1 else count
    options["pipeline"] = {"stages": scopes.modules_of_stages()}
    if fields["pp"] != count:
        options["pipeline"]["chunks"] = chunks
    if pipeline.schedule is not None:
        options["pipeline"]["schedule"] = pipeline.schedule
    if pipeline.micro_batches is not None:
        fields["accumulate"] = pipeline.micro_batches


def _say_tensor_parallel(
    scopes: Scopes,
    world: int,
    said: Mapping[str, Any],
    fields: dict[str, Any],
    options: dict[str, dict[str, Any]],
) -> None:
    splits = scopes.joint_splits
    if not splits:
        return
    counts = {scope.devices for scope in splits if scope.devices is not None}
    fields["tp"] = counts.pop() if counts else _left(scopes, world, said)
    modules = scopes.modules_in(splits)
    if fields["tp"] == 1:
        return
    options["tensor_parallel"] = {} if modules == ("",) else {"modules": modules}
    layout = _layout_of_lone_layers(scopes, modules, _layout_by_dim(scopes, splits))
    if layout:
        options["tensor_parallel"]["plan"] = layout
    if not options["tensor_parallel"]:
        del options["tensor_parallel"]


def _left(scopes: Scopes, world: int, said: Mapping[str, Any]) -> int:
    """The ranks that a split without a number takes: all that what else was said leaves."""
    if "tp" in said:
        return int(said["tp"])
    others = math.prod(int(said.get(name, 1)) for name in DEGREES)
    around = {scope.inside("replica") for scope in scopes.joint_splits}
    counts = {scope.devices for scope in around if scope is not None and scope.devices is not None}
    stages = int(said.get("pp", 1))
    if counts:
        devices = counts.pop()
        if devices % stages:
            raise PlanError(
                f"replica({devices}) in {scopes.model} holds {stages} stages, which do not divide its ranks."
            )
        return devices // stages
    if world % others:
        raise PlanError(_misfit(scopes, world, others))
    return world // others


def _say_split(scopes: Scopes, world: int, said: Mapping[str, Any], options: dict[str, dict[str, Any]]) -> None:
    splits = scopes.splits_beside
    if not splits:
        return
    data = world // math.prod(int(said.get(name, 1)) for name in DEGREES if name not in DATA_DEGREES)
    if data == 1:
        return
    from paraflow.plugins.split import kinds_of

    modules, layout = scopes.modules_in(splits), _layout_by_dim(scopes, splits)
    kinds_of(scopes.modules[""], modules, layout)  # refuses what it cannot split
    options["split"] = {"modules": modules, "plan": layout} if layout else {"modules": modules}
    degrees = {scope.devices for scope in splits}
    if degrees <= {None, data}:
        return
    degree = next((n for n in degrees if n is not None), data)
    if len(degrees - {degree}) or data % degree or degree == 1:
        raise PlanError(_uneven_splits(scopes, sorted({n or data for n in degrees}), data))
    options["split"]["degree"] = degree


def _uneven_splits(scopes: Scopes, degrees: list[int], data: int) -> str:
    said = " and ".join(f"split({n})" for n in degrees)
    fits = f"Start {degrees[0]}, {2 * degrees[0]} or {3 * degrees[0]} processes" if degrees[0] > 1 else "Write split()"
    return (
        f"{said} beside replicas in {scopes.model}: all splits there are over as many ranks, two or more, which divide "
        f"the {data} data ranks. {fits}, or leave the number out: split() takes all data ranks."
    )


def _layout_by_dim(scopes: Scopes, splits: list[Scope]) -> dict[str, str]:
    """How the layers are split in scopes that say along which dimension."""
    from paraflow.plugins.split import called_layers
    from paraflow.tensor_parallel.layers import is_linear

    called = {name for name, _ in called_layers(scopes.modules[""])}
    found: dict[str, str] = {}
    for name, scope in scopes.parameters.items():
        owner, _, leaf = name.rpartition(".")
        around, layer = None if scope is None else scope.inside("split"), scopes.modules[owner]
        if around not in splits or around.dim is None or leaf != "weight":
            continue
        if is_linear(layer) and owner in called:
            found[owner] = ("colwise", "rowwise")[around.dim]
        elif (isinstance(layer, nn.Embedding) and around.dim == 1) or is_linear(layer):
            raise PlanError(_not_by_dim(scopes, owner, around))
    return found


def _not_by_dim(scopes: Scopes, name: str, scope: Scope) -> str:
    layer = scopes.modules[name]
    why = (
        "embeddings are split by their rows"
        if isinstance(layer, nn.Embedding)
        else "what is around it reads its weight directly, so that it stays whole"
    )
    return (
        f"split(dim={scope.dim}) in {scopes.model} stands around {name} ({type(layer).__name__}), and {why}. Write "
        "split() around it, and split(dim=...) around linear layers only."
    )


def _layout_of_lone_layers(scopes: Scopes, modules: tuple[str, ...], said: dict[str, str]) -> dict[str, str]:
    """How the layers are split that belong to no attention and no pair: a scope asks for them too."""
    from paraflow.plugins.split import lone_layers
    from paraflow.tensor_parallel.layout import layout_of

    model = scopes.modules[""]
    layout = {name: "colwise_joined" if kind == "colwise" else kind for name, kind in said.items()}
    taken = {*layout_of(model, layout, modules).names, *layout}
    return {**layout, **{name: kind for name, kind in lone_layers(model, modules).items() if name not in taken}}


def _automatic(model: nn.Module, world: int, said: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    if {"pp", "fsdp", "tp"} & set(said):  # the layout was said
        return {}
    need = sum(parameter.numel() for parameter in model.parameters()) * _TRAINING_BYTES
    budget = said.get("memory_budget")
    room = _memory(device) if budget is None else bytes_of(budget)
    left = world // int(said.get("dp", 1))
    for stages in (n for n in range(1, left + 1) if left % n == 0):
        if need <= room * stages:
            return {"pp": stages} if stages > 1 else {}
    raise PlanError(
        f"{type(model).__name__} takes {as_text(need)} for parameters, gradients and optimizer, and {left} ranks with "
        f"{as_text(room)} each do not hold that. Start more processes, or write fsdp={left} and cpu_offload="
        "'optimizer' instead of auto_parallel()."
    )


def _memory(device: torch.device) -> int:
    """The memory of a rank, free or not: ranks that looked at what is free would not all decide alike."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // local_world_size()
    except (ValueError, OSError, AttributeError):
        return 4 * 1024**3


def _require_fitting(scopes: Scopes, world: int, fields: Mapping[str, Any]) -> None:
    needed = math.prod(int(fields.get(name, 1)) for name in DEGREES)
    inner = math.prod(int(fields.get(name, 1)) for name in ("pp", "cp", "tp"))
    for scope in scopes.all("replica"):
        if scope.devices not in (None, inner, inner * int(fields.get("fsdp", 1))):
            raise PlanError(
                f"replica({scope.devices}) in {scopes.model} holds what takes {inner} rank{'s' if inner > 1 else ''}, "
                f"not {scope.devices}. Write replica(), or open in it what is to take {scope.devices}: a split(), or a "
                "pipeline() of stages."
            )
    if world % needed:
        raise PlanError(_misfit(scopes, world, needed))


def _misfit(scopes: Scopes, world: int, needed: int) -> str:
    outlines = ", ".join(dict.fromkeys(str(scope) for scope in scopes.parameters.values() if scope is not None))
    return (
        f"The scopes of {scopes.model} ({outlines}) take {needed} ranks, of which a world of {world} is no multiple. "
        f"Start {needed}, {2 * needed} or {3 * needed} processes, and so on: paraflow launch -n {needed} SCRIPT."
    )
