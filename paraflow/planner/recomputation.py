"""What backward needs of each block, kept or computed again: the cut that meets a budget at the least time.

The model of memory: backward frees the blocks from the last to the first, so that while it is in block i, there are
what the blocks before it hold and all that block i needs at once. With h for what a treatment holds and w for what is
there in a block's own backward, the peak is

    max over i of  h_1 + ... + h_(i-1) + w_i

where w_i hardly depends on the treatment: what is computed again is there at once. What lies outside the blocks counts
as blocks that are kept. The model of time: what is computed again costs its forward once more, up to the last tensor
that backward needs; a copy to the host costs what cannot be hidden behind the blocks after it.

Recomputation at the borders of blocks is Chen et al. 2016 ("Training deep nets with sublinear memory cost"), that of
single operations Korthikanti et al. 2022 ("Reducing activation recomputation in large transformer models"); that a
choice is the cheapest within a budget, and not a rule of thumb, is the aim of Jain et al. 2020 ("Checkmate"), who
solve an integer program over single operations, and of Alpa's and Galvatron's planners, which choose a layer at a time
as here. A chain of blocks needs no integer program: what matters of the blocks before is one number, the bytes they
hold, so that the cheapest ways to hold so many are all that has to be carried from block to block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from paraflow.planner.blocks import BlockProfile, Operation, Profile
from paraflow.planner.treatments import Costs, Kind, Option, Treatment, options

__all__ = [
    "BlockProfile",
    "Costs",
    "Cut",
    "Decision",
    "Kind",
    "Operation",
    "Profile",
    "Treatment",
    "choose",
    "model_state_bytes",
]

_FRONT = 300
"""So many ways to treat the blocks so far are carried on; where there are more, of those close in bytes the fastest."""

_BACKWARD = 2.0
"""Seconds of backward for one of forward: a product has two gradients."""


@dataclass(frozen=True)
class Decision:
    """What was chosen for one block.

    Attributes:
        block: Its name.
        treatment: What becomes of its activations.
        saved: Bytes that are not held between forward and backward.
        added: Seconds that a micro-batch takes longer.
    """

    block: str
    treatment: Treatment
    saved: int
    added: float


@dataclass(frozen=True)
class Cut:
    """What was chosen for all blocks, and what it should come to.

    Attributes:
        decisions: One a block, in the order of forward.
        peak: The predicted peak in bytes: activations and `model_state`.
        budget: The bytes that were given.
        smallest: The smallest budget that could be met.
        seconds: Predicted seconds of a micro-batch's forward and backward where all is kept.
        unmet: What is wrong and what budget to write instead, where no choice meets it; the decisions are then those
            that need the least.
    """

    decisions: tuple[Decision, ...]
    peak: int
    budget: int
    smallest: int
    seconds: float
    unmet: str | None = None

    @property
    def treatments(self) -> dict[str, Treatment]:
        """What becomes of each block, by name."""
        return {decision.block: decision.treatment for decision in self.decisions}

    @property
    def added(self) -> float:
        """Predicted seconds that a micro-batch takes longer."""
        return sum(decision.added for decision in self.decisions)

    @property
    def saved(self) -> int:
        """Bytes that are not held between forward and backward."""
        return sum(decision.saved for decision in self.decisions)

    def table(self) -> list[str]:
        """Returns the choice as lines to print; neighbours that are treated alike share one."""
        rows = [("block", "treatment", "bytes saved", "time added")]
        for group in _alike(self.decisions):
            first, last = group[0].block, group[-1].block
            name = first if len(group) == 1 else f"{first} to {last} ({len(group)})"
            size, added = sum(one.saved for one in group), sum(one.added for one in group)
            rows.append((name, _in_words(group[0].treatment), _size(size), f"{added * 1e3:.2f} ms"))
        rows.append(("total", "", _size(self.saved), f"{self.added * 1e3:.2f} ms"))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}"
            for row in rows
        ]
        share = self.added / self.seconds if self.seconds else 0.0
        peak = f"predicted peak {_size(self.peak)} of {_size(self.budget)}, step time +{share:.1%}"
        return [*lines, peak]


def choose(
    profile: Profile,
    budget: int,
    *,
    costs: Costs | None = None,
    model_state: int = 0,
    applying: int = 0,
) -> Cut:
    """Chooses what becomes of each block: the least time added within a budget.

    Args:
        profile: The model's parts, as ``paraflow.profiler.blocks`` measures or estimates them.
        budget: Bytes for the activations of one micro-batch and for `model_state`.
        costs: What the ways of treating a block cost besides the computation.
        model_state: Bytes that are there beside the activations; see `model_state_bytes`.
        applying: Bytes that are there while the optimizer is applied, when no activations are.

    Returns:
        The choice; its `unmet` says so where no choice meets the budget.

    Example:
        >>> block = BlockProfile("0", kept=100, input=10, whole=100, seconds=2.0, again=2.0)
        >>> second = BlockProfile("1", kept=100, input=10, whole=100, seconds=1.0, again=1.0)
        >>> cut = choose(Profile((block, second), seconds=3.0), budget=110, costs=Costs(bytes=0))
        >>> [decision.treatment.kind for decision in cut.decisions], cut.peak
        (['recompute', 'keep'], 110)
        >>> choose(Profile((block, second), seconds=3.0), budget=100, costs=Costs(bytes=0)).unmet[:64]
        'The budget of 100 B cannot be met: where each block holds the le'
    """
    ways = _ways(profile, costs or Costs())
    least = _least(ways)
    smallest = max(applying, model_state + max(_peaks(ways, least), default=0))
    found = _fastest(ways, budget - model_state) if budget >= smallest else None
    chosen = least if found is None else found
    decisions = tuple(
        Decision(part.name, option.treatment, part.kept - option.held, option.added)
        for part, option in zip(profile.parts, chosen, strict=True)
        if part.is_block
    )
    unmet = None if budget >= smallest else _unmet(budget, smallest, model_state, applying)
    peak = max(applying, model_state + max(_peaks(ways, chosen), default=0))
    return Cut(decisions, peak, budget, smallest, profile.seconds * (1 + _BACKWARD), unmet)


def model_state_bytes(
    parameters: int, *, trainable: int | None = None, width: int = 4, slots: int = 2, optimizer: int | None = None
) -> int:
    """Returns what a model takes on one rank besides its activations.

    Parameters and gradients at `width` bytes each, and the optimizer's state in fp32: 16 bytes a parameter for Adam in
    fp32 (Rajbhandari et al. 2020, section 3).

    Args:
        parameters: Parameters that the rank holds, in number.
        trainable: How many of them are trained; all if None.
        width: Bytes of a parameter and of a gradient.
        slots: Numbers that the optimizer keeps for a trained parameter: 2 for Adam, 1 for momentum, 0 for plain SGD.
        optimizer: Bytes of the optimizer's state where it is known; then `slots` does not count.

    Example:
        >>> model_state_bytes(1_000_000), model_state_bytes(1_000_000, trainable=0)
        (16000000, 4000000)
    """
    trained = parameters if trainable is None else trainable
    return parameters * width + trained * width + (trained * slots * 4 if optimizer is None else optimizer)


_Ways = Sequence[Sequence[Option]]
_Extend = Callable[[int, float, Option, int], float | None]
"""From the bytes held so far, the cost so far, a treatment, and what the next part needs at once, to the new cost."""


def _ways(profile: Profile, costs: Costs) -> _Ways:
    following = [part.seconds for part in profile.parts[1:]] + [0.0]
    return [options(part, costs, after) for part, after in zip(profile.parts, following, strict=True)]


def _least(ways: _Ways) -> Sequence[Option]:
    """The way with the smallest peak."""
    if any(option.early for found in ways for option in found):
        return _search(ways, _peak) or []
    # What holds the least needs no more in its own backward than anything else.
    return [min(found, key=lambda option: (option.held, option.whole)) for found in ways]


def _fastest(ways: _Ways, budget: int) -> Sequence[Option] | None:
    """The way that adds the least within a budget."""
    keeping = [min(found, key=lambda option: (option.added, option.held)) for found in ways]
    return keeping if max(_peaks(ways, keeping), default=0) <= budget else _search(ways, _within(budget))


def _search(ways: _Ways, extend: _Extend) -> list[Option] | None:
    """The cheapest way to treat all parts: dynamic programming over the bytes held, exact up to `_FRONT`."""
    front: list[_Held] = [_Held(0, 0.0)]
    for part, found in enumerate(ways):
        following = max((option.whole for option in ways[part + 1]), default=0) if part + 1 < len(ways) else 0
        longer = [
            _Held(held.bytes + option.held, cost, option, held)
            for held in front
            for option in found
            if (cost := extend(held.bytes, held.cost, option, following)) is not None
        ]
        front = _thinned(_pareto(longer))
    return min(front, key=lambda held: held.cost).path() if front else None


class _Held(NamedTuple):
    bytes: int
    cost: float
    option: Option | None = None
    before: _Held | None = None

    def path(self) -> list[Option]:
        found: list[Option] = []
        at: _Held | None = self
        while at is not None and at.option is not None:
            found.append(at.option)
            at = at.before
        return found[::-1]


def _pareto(held: list[_Held]) -> list[_Held]:
    """Those that no other beats in bytes and cost, by rising bytes."""
    front: list[_Held] = []
    for one in sorted(held, key=itemgetter(0, 1)):
        if not front or one.cost < front[-1].cost:
            front.append(one)
    return front


def _thinned(front: list[_Held]) -> list[_Held]:
    """At most `_FRONT`, the one with the fewest bytes among them, so that what can be met still can."""
    if len(front) <= _FRONT:
        return front
    width = (front[-1].bytes - front[0].bytes) / _FRONT
    # Costs fall as bytes rise, so the last of each class is its cheapest.
    cheapest = {int((one.bytes - front[0].bytes) / width): one for one in front[1:]}
    return [front[0], *cheapest.values()]


def _reach(held: int, option: Option, following: int) -> int:
    """The most that is there in a part's backward, and in that of the part after it while this one is fetched."""
    early = held + max(option.early, option.held) + following if option.early else 0
    return max(held + option.whole, held + option.held, early)


def _peak(held: int, cost: float, option: Option, following: int) -> float:
    return max(cost, _reach(held, option, following))


def _within(budget: int) -> _Extend:
    def extend(held: int, cost: float, option: Option, following: int) -> float | None:
        return cost + option.added if _reach(held, option, following) <= budget else None

    return extend


def _peaks(ways: _Ways, chosen: Sequence[Option]) -> list[int]:
    held, peaks = 0, []
    for part, option in enumerate(chosen):
        following = max(other.whole for other in ways[part + 1]) if part + 1 < len(ways) else 0
        peaks.append(_reach(held, option, following))
        held += option.held
    return peaks


def _unmet(budget: int, smallest: int, model_state: int, applying: int) -> str:
    missing = f"which is {_size(smallest - budget)} too much. Write memory_budget={math.ceil(smallest)} or more."
    if smallest == applying:
        what = f"applying the optimizer takes {_size(applying)} with the model's state"
    else:
        state = f"the model's state takes {_size(model_state)} and " if model_state else ""
        activations = _size(smallest - model_state)
        what = f"where each block holds the least, {state}the activations of a micro-batch take {activations}"
    return f"The budget of {_size(budget)} cannot be met: {what}, {missing}"


def _alike(decisions: Sequence[Decision]) -> list[list[Decision]]:
    groups: list[list[Decision]] = []
    for decision in decisions:
        if groups and groups[-1][-1].treatment == decision.treatment:
            groups[-1].append(decision)
        else:
            groups.append([decision])
    return groups


def _in_words(treatment: Treatment) -> str:
    if treatment.kind != "operations":
        return treatment.kind
    kept: dict[str, int] = {}
    for name, _ in treatment.operations:
        short = name.removeprefix("aten.").removesuffix(".default")
        kept[short] = kept.get(short, 0) + 1
    return "recompute, keep " + ", ".join(f"{count} {name}" if count > 1 else name for name, count in kept.items())


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
