"""What can become of a block's activations, and what each way takes in memory and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paraflow.planner.blocks import BlockProfile, Operation

Kind = Literal["keep", "recompute", "operations", "offload"]


@dataclass(frozen=True)
class Treatment:
    """What becomes of the activations of one block.

    Attributes:
        kind: ``"keep"`` all, ``"recompute"`` all but the block's input, keep the outputs of some ``"operations"`` and
            recompute the rest, or ``"offload"`` what is kept to the host.
        operations: What is kept where the kind is ``"operations"``: operator names such as ``"aten.addmm.default"``
            and, from 0, which of the operator's calls in the block's forward.
    """

    kind: Kind
    operations: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Costs:
    """What the ways of treating a block cost besides the computation itself.

    Attributes:
        block: Seconds for setting up one recomputation: the random state and the graph.
        bytes: Bytes that one recomputation notes, the random state among them.
        operation: Seconds that each operator call takes longer where operations are told apart, in forward and again
            in backward.
        link: Bytes a second between device and host in one direction, or None where nothing can be offloaded.
        choices: At most so many sets of operations are looked at for a block.
    """

    block: float = 1e-4
    bytes: int = 2**13
    operation: float = 1e-5
    link: float | None = None
    choices: int = 8


@dataclass(frozen=True)
class Option:
    """A treatment of one block, and what it takes.

    Attributes:
        treatment: What becomes of the block.
        held: Bytes that stay between its forward and its backward.
        whole: Bytes that are there at once in its backward.
        added: Seconds that a step takes longer.
        early: Bytes of it that are there before its backward begins, in that of the part after it.
    """

    treatment: Treatment
    held: int
    whole: int
    added: float
    early: int = 0


def options(block: BlockProfile, costs: Costs, following: float = 0.0) -> list[Option]:
    """Returns what can become of a block, without what another way beats in bytes and in seconds.

    Args:
        block: The block.
        costs: What the ways cost besides the computation.
        following: Forward seconds of what comes after the block: behind it, copies are hidden.

    Example:
        >>> block = BlockProfile("0", kept=100, input=10, whole=120, seconds=2.0, again=1.0)
        >>> [(option.treatment.kind, option.held) for option in options(block, Costs(bytes=0, link=40))]
        [('offload', 0), ('recompute', 10), ('keep', 100)]
    """
    keep = Option(Treatment("keep"), block.kept, block.whole, 0.0)
    if not block.is_block:
        return [keep]
    found = [keep]
    if block.repeatable:
        found += [_recomputed(block, costs), *_with_operations(block, costs)]
    if costs.link is not None:
        found.append(_offloaded(block, costs.link, following))
    return sorted(_undominated(found), key=lambda option: -option.added)


def _recomputed(block: BlockProfile, costs: Costs) -> Option:
    noted = costs.bytes * block.calls
    added = block.again + costs.block * block.calls
    return Option(Treatment("recompute"), block.input + noted, block.whole + noted, added)


def _with_operations(block: BlockProfile, costs: Costs) -> list[Option]:
    """Recomputation of all but the operations that take the most time for a byte, one more each time."""
    candidates = [op for op in block.operations if op.keepable and op.seconds > 0]
    candidates.sort(key=lambda op: op.seconds / op.bytes if op.bytes else float("inf"), reverse=True)
    noted = costs.bytes * block.calls
    watched = 2 * costs.operation * len(block.operations) + costs.block
    found = []
    for count in _spread(candidates, costs.choices):
        kept = candidates[:count]
        held = block.input + noted + sum(op.bytes for op in kept)
        added = block.again - sum(op.seconds for op in kept) + watched * block.calls
        if held < block.kept:
            names = tuple((op.name, op.occurrence) for op in kept)
            whole = noted + _whole_with(block, kept)
            found.append(Option(Treatment("operations", names), held, whole, max(added, 0.0)))
    return found


def _whole_with(block: BlockProfile, kept: Sequence[Operation]) -> int:
    """What is there at once in a block's backward: what is kept of operations is held until its end."""
    chosen = {(op.name, op.occurrence) for op in kept}
    whole, later = block.whole, 0
    for op in reversed(block.operations):
        if (op.name, op.occurrence) in chosen:
            later += op.bytes
        whole = max(whole, op.there + later)
    return whole + sum(op.extra for op in kept)


def _spread(operations: Sequence[Operation], choices: int) -> list[int]:
    """How many of the operations to keep: at most so many counts, about evenly apart in seconds saved."""
    total, sofar = sum(op.seconds for op in operations), 0.0
    counts: list[int] = []
    for count, op in enumerate(operations, 1):
        sofar += op.seconds
        if sofar >= total * (len(counts) + 1) / choices or count == len(operations):
            counts.append(count)
    return counts[-choices:]


def _offloaded(block: BlockProfile, link: float, following: float) -> Option:
    """A copy out is hidden behind the forward of what follows, the copy back behind its backward, twice as long."""
    size = max(block.kept, block.input)
    added = max(0.0, size / link - following) + max(0.0, size / link - 2 * following)
    return Option(Treatment("offload"), block.shared, block.whole, added, early=size)


def _undominated(found: Sequence[Option]) -> list[Option]:
    def beats(one: Option, other: Option) -> bool:
        mine, its = (one.held, one.whole, one.added, one.early), (other.held, other.whole, other.added, other.early)
        return mine != its and all(a <= b for a, b in zip(mine, its, strict=True))

    return [option for option in found if not any(beats(other, option) for other in found)]
