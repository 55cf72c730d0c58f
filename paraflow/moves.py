"""What moves between ranks in a step: gradients, shards, and activations at the borders of stages and split layers.

Bytes are what one rank sends for one optimizer step, by the algorithms that send least: (n - 1) / n of a tensor for a
gather or a reduce-scatter over n ranks, twice that for an all-reduce. Nothing is measured; what recomputation sends
again, and messages of a few bytes, are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from paraflow.plan import Plan

_COLUMNS = ("colwise", "colwise_joined", "logits", "selected_columns")
_PASSED_ON = ("colwise", "selected_columns")
_LEAVING = ("rowwise", "vocabulary", "selected_rows")
_STATISTICS = 3 * 4  # of a row of logits: the highest, the sum of exponentials and the target's score, in fp32
_LABEL, _LOSS = 8, 4


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
class Traffic:
    """The tensors that go into and come out of a module, for one micro-batch of a rank.

    Attributes:
        into: The bytes of its first input.
        out: The bytes of its first output.
        rows: The rows of its input: the product of all dimensions but the last.
        source: A number for its input, the same for modules that are given the same tensor.
        has_gradient: Whether a gradient goes back into its input.
    """

    into: int
    out: int
    rows: int
    source: int = 0
    has_gradient: bool = True


@dataclass
class Crossings:
    """Which split layers' inputs are brought in, and what goes out of them; None where traffic is not known.

    A tensor that several layers take one after another is brought in once.

    Attributes:
        entering: The layers whose input is brought in.
        cut: The layers split by inputs that are given whole ones, of which each rank takes its part.
        leaving: The layers whose outputs are summed up.
        joined: The layers whose outputs are joined.
        logits: The layers whose outputs stay split.
    """

    entering: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    leaving: list[str] = field(default_factory=list)
    joined: list[str] = field(default_factory=list)
    logits: list[str] = field(default_factory=list)


def crossings_of(kinds: Mapping[str, str], traffic: Mapping[str, Traffic]) -> Crossings:
    """Follows the split layers in the order in which they ran, or in that of the model where none is known.

    Example:
        >>> crossings_of({"up": "colwise", "down": "rowwise"}, {})
        Crossings(entering=['up'], cut=[], leaving=['down'], joined=[], logits=[])
    """
    found, source, is_parted = Crossings(), None, False
    order = {name: kinds[name] for name in [*traffic, *kinds] if name in kinds}
    for name, kind in order.items():
        seen = traffic.get(name)
        if kind in _COLUMNS:
            if seen is None or seen.source != source:
                found.entering.append(name)
            source = None if seen is None else seen.source
        elif kind == "rowwise" and not is_parted:
            found.cut.append(name)
        if kind in _LEAVING:
            found.leaving.append(name)
        elif kind == "colwise_joined":
            found.joined.append(name)
        elif kind == "logits":
            found.logits.append(name)
        if kind not in _PASSED_ON:
            source = None
        is_parted = kind in _PASSED_ON
    return found


def all_reduced(size: int, ranks: int) -> int:
    """The bytes that a rank sends for the sum of a tensor of so many bytes.

    Example:
        >>> all_reduced(100, 4), gathered(100, 4)
        (150, 75)
    """
    return 2 * gathered(size, ranks)


def gathered(size: int, ranks: int) -> int:
    """The bytes that a rank sends for a tensor of so many bytes to be joined, or summed and scattered."""
    return size * (ranks - 1) // ranks


def moves_of_gradients(held: Mapping[int, int], beside: int, plan: Plan) -> Iterable[Move]:
    """The gradients that replicas average.

    Args:
        held: The trained parameters that a rank of each stage holds, but for those split over data ranks.
        beside: Those of these that a rank holds.
        plan: The plan.
    """
    if plan.dp == 1:
        return
    size = 4 if plan.comm_hook is None else 2
    for stage, count in held.items():
        if count:
            where = f"{plan.dp} replicas" + (f" of stage {stage}" if plan.pp > 1 else "")
            yield Move(f"gradients of {count:,} parameters, averaged", where, all_reduced(count * size, plan.dp))
    replicas = plan.dp // (plan.options.get("split", {}).get("degree") or plan.dp)
    if beside and replicas > 1:
        sent = all_reduced(beside * size, replicas)
        yield Move(f"gradients of {beside:,} split parameters, averaged", f"{replicas} replicas of the split", sent)


def moves_of_shards(most: int, plan: Plan) -> Iterable[Move]:
    """The parameters that are gathered and the gradients that are scattered, of so many that a rank has a shard of."""
    if plan.fsdp == 1:
        return
    said = plan.options.get("fsdp", {})
    zero, accumulate = said.get("zero") or plan.zero, plan.accumulate
    keeps = said.get("reshard_after_forward", zero == 3) is False
    if plan.pp > 1 and not plan.options.get("pipeline", {}).get("reshard", False):
        keeps = True
    default = "last" if zero == 1 and plan.comm_hook is None else "each"
    reductions = accumulate if (said.get("reduce") or default) == "each" else 1
    width = 2 if said.get("gather_dtype") in ("bf16", "fp16") else 4
    ranks = f"{plan.fsdp} shards"
    times, when = (1, "once a step") if keeps else (2 * accumulate, "for each forward and backward")
    yield Move(f"parameters, gathered {when}", ranks, times * gathered(most * plan.fsdp * width, plan.fsdp))
    size = most * plan.fsdp * (4 if plan.comm_hook is None else 2)
    yield Move("gradients, reduced and scattered", ranks, reductions * gathered(size, plan.fsdp))


def moves_between_stages(stages: Sequence[Sequence[str]], plan: Plan, traffic: Mapping[str, Traffic]) -> Iterable[Move]:
    """The activations that go from stage to stage."""
    for place, units in enumerate(stages[:-1]):
        last = traffic.get(units[-1])
        size = None if last is None else last.out * plan.accumulate
        what = f"activations behind {units[-1]}; their gradients go back"
        yield Move(what, f"stage {place} and stage {place + 1}", size)


def moves_of_split(
    kinds: Mapping[str, str], partial: int, plan: Plan, traffic: Mapping[str, Traffic]
) -> Iterator[Move]:
    """What ranks that share a batch send each other for split layers: they hold the same activations outside.

    Args:
        kinds: How layers are split, by name.
        partial: The parameters that are whole on each rank, which uses a part: their gradients are summed.
        plan: The plan.
        traffic: What goes in and out of modules.
    """
    found, ranks, where = crossings_of(kinds, traffic), plan.tp, f"{plan.tp} parts"

    def total(names: Sequence[str], sent: Mapping[str, int]) -> int | None:
        return sum(sent[name] for name in names) * plan.accumulate if traffic.keys() >= set(names) else None

    outputs = {name: all_reduced(seen.out, ranks) for name, seen in traffic.items()}
    joined = {name: gathered(seen.out, ranks) for name, seen in traffic.items()}
    back = {name: seen.has_gradient * all_reduced(seen.into, ranks) for name, seen in traffic.items()}
    parts = {name: seen.has_gradient * gathered(seen.into, ranks) for name, seen in traffic.items()}
    rows = {name: (ranks - 1) * seen.rows * _STATISTICS for name, seen in traffic.items()}
    for what, names, sent in (
        ("outputs of {} split layers, summed", found.leaving, outputs),
        ("outputs of {} split layers, joined", found.joined, joined),
        ("gradients of the inputs of {} split layers, summed", found.entering, back),
        ("gradients of the inputs of {} split layers, joined", found.cut, parts),
        ("maxima, sums and targets' scores of the rows of {} layers of logits", found.logits, rows),
    ):
        if names:
            yield Move(what.format(len(names)), where, total(names, sent))
    if partial:
        what = f"gradients of {partial:,} parameters that are whole on each rank, summed"
        yield Move(what, where, all_reduced(4 * partial, ranks))


def moves_beside(kinds: Mapping[str, str], ranks: int, plan: Plan, traffic: Mapping[str, Traffic]) -> Iterator[Move]:
    """What so many data ranks send each other for the layers that are split over them: each has samples of its own."""
    found, others, where = crossings_of(kinds, traffic), ranks - 1, f"{ranks} data ranks"
    brought_in = {*found.entering, *found.cut, *(name for name, kind in kinds.items() if kind == "vocabulary")}
    for name in kinds:
        seen = traffic.get(name)
        times = others * plan.accumulate
        if name in brought_in:
            back = seen is not None and seen.has_gradient
            what = f"inputs of {name}, gathered" + (", and their gradients" if back or seen is None else "")
            yield Move(what, where, None if seen is None else times * seen.into * (2 if back else 1))
        if name in found.logits:
            row = _LABEL + _LOSS + ranks * _STATISTICS
            what = f"labels, maxima, sums and targets' scores of the rows of {name}"
            yield Move(what, where, None if seen is None else times * seen.rows * row)
        if name in found.leaving or name in found.joined:
            each = 1 if name in found.leaving else 1 / ranks  # a joined output is sent in columns
            what = f"outputs of {name}, each to the rank of its samples, and their gradients"
            yield Move(what, where, None if seen is None else int(2 * times * seen.out * each))
