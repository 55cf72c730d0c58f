"""The task graph of a model under a plan: which ranks hold which modules, and what moves between them in a step.

Bytes are what one rank sends for one optimizer step, by the algorithms that send least: 2 (n - 1) / n of a tensor for
an all-reduce over n ranks, half of that for a gather or a reduce-scatter. Nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

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
class Move:
    """What ranks send each other in a step.

    Attributes:
        what: What it is.
        between: Which ranks.
        bytes: What one rank sends in a step; None where the sizes of activations are not known.
    """

    what: str
    between: str
    bytes: int | None


@dataclass(frozen=True)
class TaskGraph:
    """A model's nodes and what moves between their ranks."""

    nodes: tuple[Node, ...]
    moves: tuple[Move, ...]


@dataclass(frozen=True)
class Traffic:
    """The bytes of the tensors that go into and come out of a module, for one micro-batch of a rank.

    Attributes:
        into: Those of its first input.
        out: Those of its first output.
        rows: The size of the first dimension of its input.
    """

    into: int
    out: int
    rows: int


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
    split, beside = _split_layers(model, plan)
    layouts = {**dict.fromkeys(split, _SPLIT), **dict.fromkeys(beside, _BESIDE)}
    nodes = tuple(_nodes(model, plan, stages, layouts))
    moves = [
        *_gradients(nodes, plan),
        *_shards(nodes, plan),
        *_boundaries(stages, plan, traffic),
        *_inside_splits(split, plan, traffic),
        *_beside(beside, plan, traffic),
    ]
    return TaskGraph(nodes, tuple(moves))


def _stages(model: nn.Module, plan: Plan) -> tuple[tuple[str, ...], ...]:
    """The names of the units of each stage, or nothing."""
    if plan.pp == 1:
        return ()
    from paraflow.pipelining.cut import cut

    options = plan.options.get("pipeline", {})
    return cut(model, plan.pp * int(options.get("chunks", 1)), stages=options.get("stages")).names


def _split_layers(model: nn.Module, plan: Plan) -> tuple[dict[str, str], dict[str, str]]:
    """The layers that are split over the ranks of a replica, and over the data ranks: how, by name."""
    split: dict[str, str] = {}
    beside: dict[str, str] = {}
    if plan.tp > 1:
        from paraflow.tensor_parallel.layout import layout_of

        options = plan.options.get("tensor_parallel", {})
        layout = layout_of(model, options.get("plan"), options.get("modules"))
        split = {name: layout.kinds[name] for name in layout.names if name in layout.kinds}
        for attention in layout.attentions:
            split.update(dict.fromkeys(attention.layers, "colwise"))
            split[attention.out] = "rowwise"
    if plan.dp > 1 and "split" in plan.options:
        from paraflow.plugins.split import kinds_of

        beside = dict(kinds_of(model, **plan.options["split"]))
    return split, beside


def _nodes(model: nn.Module, plan: Plan, stages: Sequence[Sequence[str]], layouts: Mapping[str, str]) -> Iterable[Node]:
    marks = Scopes.of(model).parameters
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    keys = {name: (_stage_of(name, stages), _layout_of(name, layouts)) for name in sizes}
    for key in sorted(dict.fromkeys(keys.values()), key=lambda key: (key[0], key[1] != _WHOLE)):
        stage, layout = key
        own = [name for name in sizes if keys[name] == key]
        count = sum(sizes[name] for name in own)
        parts = {_WHOLE: 1, _SPLIT: plan.tp, _BESIDE: plan.dp}[layout] * plan.fsdp
        scope = next((str(mark) for name in own if (mark := marks[name]) is not None), None)
        yield Node(
            scope or layout,
            _largest(model, own, sizes),
            count,
            _ranks_of(plan, stage, len(stages)),
            -(-count // parts),
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


def _gradients(nodes: Sequence[Node], plan: Plan) -> Iterable[Move]:
    if plan.dp == 1:
        return
    size = 4 if plan.comm_hook is None else 2
    for stage in sorted({node.stage for node in nodes}):
        held = sum(node.held for node in nodes if node.stage == stage and node.layout != _BESIDE)
        if held:
            where = f"{plan.dp} replicas" + (f" of stage {stage}" if plan.pp > 1 else "")
            yield Move(f"gradients of {held:,} parameters, averaged", where, _all_reduce(held * size, plan.dp))


def _shards(nodes: Sequence[Node], plan: Plan) -> Iterable[Move]:
    if plan.fsdp == 1:
        return
    most = max(sum(n.held for n in nodes if n.stage == stage) for stage in {n.stage for n in nodes})
    whole = most * plan.fsdp * 4
    times = 2 * plan.accumulate if plan.zero == 3 else 1
    ranks = f"{plan.fsdp} shards"
    yield Move("parameters, gathered for forward and backward", ranks, times * _gather(whole, plan.fsdp))
    yield Move("gradients, reduced and scattered", ranks, _gather(whole, plan.fsdp))


def _boundaries(stages: Sequence[Sequence[str]], plan: Plan, traffic: Mapping[str, Traffic]) -> Iterable[Move]:
    for place, units in enumerate(stages[:-1]):
        last = traffic.get(units[-1])
        size = None if last is None else 2 * last.out * plan.accumulate
        between = f"stage {place} and stage {place + 1}"
        yield Move(f"activations behind {units[-1]}, and their gradients", between, size)


def _inside_splits(split: Mapping[str, str], plan: Plan, traffic: Mapping[str, Traffic]) -> Iterable[Move]:
    leaving = [name for name, kind in split.items() if kind in ("rowwise", "colwise_joined", "vocabulary", "logits")]
    if not leaving:
        return
    known = [traffic.get(name) for name in leaving]
    sent = [
        _all_reduce(t.out, plan.tp) + _all_reduce(t.into, plan.tp) for t in known if t is not None
    ]  # forward behind the layer, backward in front of those that go with it
    total = sum(sent) * plan.accumulate if len(sent) == len(leaving) else None
    yield Move(f"activations around {len(leaving)} split layers, and their gradients", f"{plan.tp} parts", total)


def _beside(beside: Mapping[str, str], plan: Plan, traffic: Mapping[str, Traffic]) -> Iterable[Move]:
    ranks = f"{plan.dp} data ranks"
    for name, kind in beside.items():
        seen = traffic.get(name)
        if kind in ("colwise", "colwise_joined", "logits"):
            sent = None if seen is None else 2 * (plan.dp - 1) * seen.into * plan.accumulate
            yield Move(f"inputs of {name}, gathered, and their gradients", ranks, sent)
        if kind == "logits":
            rows = None if seen is None else _all_reduce(seen.rows * plan.dp * 3 * 4, plan.dp) * plan.accumulate
            yield Move(f"labels, maxima and sums of the rows of {name}", ranks, rows)
        if kind in ("colwise_joined", "rowwise", "vocabulary"):
            sent = None if seen is None else 2 * (plan.dp - 1) * seen.out * plan.accumulate
            yield Move(f"outputs of {name}, each to the rank of its samples, and their gradients", ranks, sent)


def _all_reduce(size: int, ranks: int) -> int:
    return 2 * _gather(size, ranks)


def _gather(size: int, ranks: int) -> int:
    return size * (ranks - 1) // ranks


def traffic_of(module: nn.Module, run: Any) -> dict[str, Traffic]:
    """Returns what goes in and out of each module while something is run, by name: the first call of each.

    Args:
        module: The module.
        run: A function that calls it; tensors in it may be fake.
    """
    import torch

    found: dict[str, Traffic] = {}

    def note(name: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            into = _first(torch.Tensor, (args, kwargs))
            out = _first(torch.Tensor, output)
            if name not in found and into is not None and out is not None:
                found[name] = Traffic(into.nbytes, out.nbytes, into.shape[:-1].numel())

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
