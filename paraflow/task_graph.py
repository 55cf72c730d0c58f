"""The task graph of a model under a plan: which ranks hold which modules, and what moves between them in a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from paraflow.moves import (
    Move,
    Traffic,
    moves_beside,
    moves_between_stages,
    moves_of_gradients,
    moves_of_shards,
    moves_of_split,
)
from paraflow.plan import Plan
from paraflow.scope_tree import Scopes

_WHOLE, _SPLIT, _BESIDE = "replica", "split", "split over data ranks"


@dataclass(frozen=True)
class Node:
    """Modules that are laid out alike.

    Attributes:
        scope: The scope they were made in, or what the plan makes of them.
        modules: Their names, the largest of which nothing is in another node.
        parameters: Their parameters, as one device holds them.
        ranks: The ranks that hold them or a part of each.
        held: Their parameters that one of these ranks holds.
        stage: The stage they belong to.
        layout: How the ranks of a replica, or the data ranks, hold them.
    """

    scope: str
    modules: tuple[str, ...]
    parameters: int
    ranks: tuple[int, ...]
    held: int
    stage: int = 0
    layout: str = _WHOLE


@dataclass(frozen=True)
class TaskGraph:
    """A model's nodes and what moves between their ranks."""

    nodes: tuple[Node, ...]
    moves: tuple[Move, ...]


def task_graph(model: nn.Module, plan: Plan, traffic: Mapping[str, Traffic]) -> TaskGraph:
    """Lays a model out as a plan says.

    Args:
        model: The model, whole; it may be on the meta device.
        plan: The plan.
        traffic: What goes in and out of modules, by name; empty where that is not known.

    Raises:
        PlanError: The plan names modules that cannot be laid out so.
    """
    stages = _stages(model, plan)
    split, partial = _split_layers(model, plan)
    beside = _layers_beside(model, plan)
    layouts = {**dict.fromkeys(split, _SPLIT), **dict.fromkeys(beside, _BESIDE)}
    nodes = tuple(_nodes(model, plan, stages, layouts, {**split, **beside}))
    moves = [
        *_gradients(model, nodes, {**split, **beside}, stages, plan),
        *moves_of_shards(max(sum(n.held for n in nodes if n.stage == node.stage) for node in nodes), plan),
        *moves_between_stages(stages, plan, traffic),
    ]
    for stage in range(max(1, len(stages))):
        of_stage = {name: kind for name, kind in split.items() if _stage_of(f"{name}.", stages) == stage}
        summed = [name for name in partial if _stage_of(name, stages) == stage]
        count = sum(model.get_parameter(name).numel() for name in summed)
        moves += [_in_stage(move, stage, plan) for move in moves_of_split(of_stage, count, plan, traffic)]
    moves += moves_beside(beside, _ranks_beside(plan), plan, traffic)
    return TaskGraph(nodes, tuple(moves))


def _in_stage(move: Move, stage: int, plan: Plan) -> Move:
    return move if plan.pp == 1 else replace(move, between=f"{move.between} of stage {stage}")


def _ranks_beside(plan: Plan) -> int:
    """Over how many ranks layers beside replicas are split."""
    return int(plan.options.get("split", {}).get("degree") or plan.dp)


def _stages(model: nn.Module, plan: Plan) -> tuple[tuple[str, ...], ...]:
    """The names of the units of each stage, or nothing."""
    if plan.pp == 1:
        return ()
    from paraflow.pipelining.cut import cut, units_of
    from paraflow.pipelining.glue import glue_time, weights_used_by_glue

    said = plan.options.get("pipeline", {})
    glue = glue_time(model, weights_used_by_glue(model, units_of(model)))
    count = plan.pp * int(said.get("chunks", 1))
    return cut(model, count, stages=said.get("stages"), costs=said.get("costs"), glue=glue).names


def _split_layers(model: nn.Module, plan: Plan) -> tuple[dict[str, str], list[str]]:
    """The layers that the ranks of a replica split, how, by name; and the parameters whose gradients are sums."""
    if plan.tp == 1:
        return {}, []
    from paraflow.tensor_parallel.heads import share_of
    from paraflow.tensor_parallel.layout import layout_of

    options = plan.options.get("tensor_parallel", {})
    layout = layout_of(model, options.get("plan"), options.get("modules"))
    split: dict[str, str] = {name: layout.kinds[name] for name in layout.names if name in layout.kinds}
    whole = [name for name, kind in layout.kinds.items() if kind == "partial"]
    for attention in layout.attentions:
        share = share_of(attention, plan.tp, 0)
        divides = dict.fromkeys(attention.layers, share.divides_keys)
        divides.update(dict.fromkeys((attention.query, attention.out), share.divides_queries))
        for name, is_divided in divides.items():
            by_rows = name == attention.out
            kind = ("rowwise" if by_rows else "colwise") if is_divided else _selected(by_rows)
            split[name] = kind
        whole += [*attention.norms, *(name for name, is_divided in divides.items() if not is_divided)]
    owned = [f"{name}.{key}" for name in whole for key, _ in model.get_submodule(name).named_parameters()]
    return split, [n for n in owned if not (split.get(n.rpartition(".")[0]) == _selected(True) and n.endswith("bias"))]


def _selected(by_rows: bool) -> str:
    """What a layer is of which each rank has the whole, and uses the heads that are its own."""
    return "selected_rows" if by_rows else "selected_columns"


def _layers_beside(model: nn.Module, plan: Plan) -> dict[str, str]:
    """The layers that are split over data ranks: how, by name."""
    if plan.dp == 1 or "split" not in plan.options:
        return {}
    from paraflow.plugins.split import kinds_of

    options = plan.options["split"]
    return dict(kinds_of(model, options["modules"], options.get("plan")))


def _held(model: nn.Module, name: str, kinds: Mapping[str, str], ranks: int) -> int:
    """How much of a parameter the first rank of those that split layers holds: it has the most."""
    from paraflow.tensor_parallel.layers import has_inputs_first
    from paraflow.tensor_parallel.traffic import chunk_sizes

    parameter = model.get_parameter(name)
    owner, _, leaf = name.rpartition(".")
    kind = kinds.get(owner)
    if kind is None or kind.startswith("selected") or (kind == "rowwise" and leaf != "weight"):
        return parameter.numel()
    inputs_first = has_inputs_first(model.get_submodule(owner))
    dim = int(leaf == "weight" and (kind == "rowwise") != inputs_first)
    size = parameter.shape[dim]
    return parameter.numel() // size * chunk_sizes(size, ranks)[0]


def _nodes(
    model: nn.Module,
    plan: Plan,
    stages: Sequence[Sequence[str]],
    layouts: Mapping[str, str],
    kinds: Mapping[str, str],
) -> Iterable[Node]:
    marks = Scopes.of(model).parameters
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    keys = {name: (_stage_of(name, stages), _layout_of(name, layouts)) for name in sizes}
    for key in sorted(dict.fromkeys(keys.values()), key=lambda key: (key[0], key[1] != _WHOLE)):
        stage, layout = key
        own = [name for name in sizes if keys[name] == key]
        count = sum(sizes[name] for name in own)
        ranks = {_WHOLE: 1, _SPLIT: plan.tp, _BESIDE: _ranks_beside(plan)}[layout]
        held = sum(_held(model, name, kinds, ranks) for name in own)
        scope = next((str(mark) for name in own if (mark := marks[name]) is not None), None)
        yield Node(
            scope or layout,
            _largest(model, own, sizes),
            count,
            _ranks_of(plan, stage, len(stages)),
            -(-held // plan.fsdp),
            stage,
            layout,
        )


def _stage_of(name: str, stages: Sequence[Sequence[str]]) -> int:
    found = (place for place, units in enumerate(stages) if any(not u or name.startswith(f"{u}.") for u in units))
    return next(found, 0)


def _layout_of(name: str, layouts: Mapping[str, str]) -> str:
    owner, _, _ = name.rpartition(".")
    return layouts.get(owner, _WHOLE)


def _ranks_of(plan: Plan, stage: int, stages: int) -> tuple[int, ...]:
    """The ranks of a stage: stages are outermost in the mesh."""
    width = plan.world_size // plan.pp
    place = stage % plan.pp if stages else 0
    if plan.options.get("pipeline", {}).get("schedule") == "zbv" and stage >= plan.pp:
        place = 2 * plan.pp - 1 - stage
    return tuple(range(place * width, (place + 1) * width))


def _largest(model: nn.Module, own: Sequence[str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The names of the largest modules of which all parameters are among some, and of the parameters beside."""
    inside, found = set(own), []
    rest = list(own)
    for name, _ in model.named_modules():
        prefix = f"{name}." if name else ""
        held = [parameter for parameter in sizes if parameter.startswith(prefix)]
        if held and inside.issuperset(held) and any(parameter in rest for parameter in held):
            found.append(name or type(model).__name__)
            rest = [parameter for parameter in rest if not parameter.startswith(prefix)]
    return (*found, *rest)


def _gradients(
    model: nn.Module, nodes: Sequence[Node], kinds: Mapping[str, str], stages: Sequence[Sequence[str]], plan: Plan
) -> Iterable[Move]:
    """The gradients that replicas average: of what is trained."""
    held = dict.fromkeys(sorted({node.stage for node in nodes}), 0)
    beside = 0
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        part = _held(model, name, kinds, _ranks_beside(plan))
        if plan.tp == 1 and part < parameter.numel():
            beside += part
        else:
            held[_stage_of(name, stages)] += -(-_held(model, name, kinds, plan.tp) // plan.fsdp)
    return moves_of_gradients(held, beside, plan)


def traffic_of(module: nn.Module, run: Any) -> dict[str, Traffic]:
    """Returns what goes in and out of each module while something is run, by name: the first call of each.

    Args:
        module: The module.
        run: A function that calls it; tensors in it may be fake.
    """
    import torch

    found: dict[str, Traffic] = {}
    sources: list[torch.Tensor] = []  # held on to, so that no other tensor is taken for one of them

    def note(name: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            into = _first(torch.Tensor, (args, kwargs))
            out = _first(torch.Tensor, output)
            if name in found or into is None or out is None:
                return
            source = next((place for place, other in enumerate(sources) if other is into), len(sources))
            sources.extend([into] if source == len(sources) else [])
            rows = into.shape[:-1].numel()
            found[name] = Traffic(into.nbytes, out.nbytes, rows, source, into.requires_grad)

        return hook

    handles = [m.register_forward_hook(note(name), with_kwargs=True) for name, m in module.named_modules() if name]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found


def _first(kind: type, value: Any) -> Any:
    from torch.utils._pytree import tree_leaves

    return next((leaf for leaf in tree_leaves(value) if isinstance(leaf, kind)), None)
