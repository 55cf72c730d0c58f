"""In which order each rank of a pipeline runs its stages' forwards and backwards, and passes on what crosses them.

Where a rank has several stages, or backward is split, the order is that of `torch.distributed.pipelining`'s schedule,
which is asked for it under its public names. torch refuses some numbers of micro-batches: an order for more is taken
then, and what is too much is left out of it, which breaks no dependency, since a micro-batch depends on no other. So
every number of micro-batches runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from paraflow.errors import PlanError


class Kind(Enum):
    """What an action does with a stage and a micro-batch."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"  # gradients of what the stage received
    BACKWARD_WEIGHT = "backward_weight"  # gradients of its parameters
    SEND_FORWARD = "send_forward"  # to the next stage
    RECEIVE_FORWARD = "receive_forward"  # from the stage before
    SEND_BACKWARD = "send_backward"  # gradients, to the stage before
    RECEIVE_BACKWARD = "receive_backward"  # gradients, from the next stage


BACKWARDS = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
"""The kinds that compute gradients."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does.

    Attributes:
        kind: What.
        stage: The stage that does it.
        index: The micro-batch.
    """

    kind: Kind
    stage: int
    index: int

    def __str__(self) -> str:
        return f"{self.kind.value} of micro-batch {self.index} on stage {self.stage}"


class Refusal(NamedTuple):
    """Why a schedule cannot run, as a row of the legality table says it."""

    id: str
    reason: str
    remedy: str


@dataclass(frozen=True)
class Schedule:
    """A schedule by name, over a number of ranks.

    Attributes:
        name: One of `SCHEDULES`.
        degree: The ranks along "pp".
        chunks: The stages that each of them has.

    Raises:
        PlanError: There is no such schedule.

    Example:
        >>> Schedule("zbv", degree=2, chunks=2).places
        (0, 1, 1, 0)
        >>> Schedule("1f1b", degree=4).stages_of(2)
        (2,)
    """

    name: str
    degree: int
    chunks: int = 1

    def __post_init__(self) -> None:
        refusal = why_not(self.name, self.degree, self.chunks)
        if refusal is not None:
            raise PlanError(f"{refusal.reason} {refusal.remedy}", rule=refusal.id)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.degree * self.chunks

    @property
    def splits_backward(self) -> bool:
        """Whether backwards are run in two halves (zero bubble): those of parameters come later than others."""
        return self.name in ("interleaved_zero_bubble", "zbv")

    @property
    def places(self) -> tuple[int, ...]:
        """The place along "pp" that has each stage: round and round, or there and back ("zbv")."""
        there = tuple(range(self.degree))
        return there + there[::-1] if SCHEDULES[self.name].turns_back else there * self.chunks

    def stages_of(self, place: int) -> tuple[int, ...]:
        """Returns the stages of a place along "pp", in order."""
        return tuple(stage for stage, owner in enumerate(self.places) if owner == place)

    def order(self, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
        """Returns the actions of each place for a training step, in the order in which it runs them.

        Messages between stages of one place are left out. The sends and receives between two places come in the same
        order in both lists, and a receive as early as its message can come.
        """
        return _order(self, micro_batches, forward_only=False)

    def forward_order(self, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
        """Returns the actions of each place for forwards alone."""
        return _order(self, micro_batches, forward_only=True)


def receive_early(actions: Sequence[Action], computations: int) -> tuple[Action, ...]:
    """Moves each receive before some of the computations that precede it; receives keep their order.

    gloo moves no data before both sides have begun, so what is to come while a rank computes must be asked for before.

    Args:
        actions: One place's order.
        computations: How many.

    Example:
        >>> [action.kind.name for action in receive_early(Schedule("1f1b", 2).order(2)[0], 1)][2:5]
        ['RECEIVE_BACKWARD', 'FORWARD', 'SEND_FORWARD']
    """
    computed: list[int] = []
    keys: list[tuple[int, int]] = []
    for position, action in enumerate(actions):
        receives = action.kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)
        before = computed[-computations:][0] if receives and computed and computations else position
        keys.append((before, 0) if receives else (position, 1))
        if action.kind is Kind.FORWARD or action.kind in BACKWARDS:
            computed.append(position)
    return tuple(actions[position] for position in sorted(range(len(actions)), key=keys.__getitem__))


def why_not(name: str, degree: int, chunks: int = 1) -> Refusal | None:
    """Returns why a schedule cannot run, or None where it can; any number of micro-batches runs, also one.

    Example:
        >>> why_not("1f1b", degree=4)
        >>> print(why_not("zbv", degree=4).remedy)
        Write chunks=2, or schedule='1f1b'.
    """
    if name not in SCHEDULES:
        names = ", ".join(map(repr, SCHEDULES))
        reason = f"There is no pipeline schedule {name!r}."
        return Refusal("pipeline-schedule-unknown", reason, f"Write one of {names}.")
    least, most = SCHEDULES[name].chunks
    if least <= chunks <= (most or chunks):
        return None
    wanted = f"exactly {least}" if least == most else f"{least} or more"
    reason = f"schedule={name!r} takes {wanted} stages on each rank, and chunks={chunks} was given."
    instead = "1f1b" if chunks == 1 else "interleaved"
    if chunks < 1 or degree < 1:
        return Refusal("pipeline-chunks", reason, f"Write chunks={least}.")
    return Refusal("pipeline-chunks", reason, f"Write chunks={least}, or schedule={instead!r}.")


class _Known(NamedTuple):
    """A schedule: the fewest and most stages a rank may have, what each place computes, how stages are dealt."""

    chunks: tuple[int, int | None]
    computes: Callable[[Schedule, int], list[list[Action]]]
    turns_back: bool = False


def _gpipe(schedule: Schedule, micro_batches: int) -> list[list[Action]]:
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return [[Action(k, s, i) for k in kinds for i in range(micro_batches)] for s in range(schedule.degree)]


def _one_forward_one_backward(schedule: Schedule, micro_batches: int) -> list[list[Action]]:
    """Written out here: what torch's class says of itself begins with micro-batch 1 on the last rank."""
    orders = []
    for stage in range(schedule.degree):
        ahead = min(schedule.degree - 1 - stage, micro_batches)
        actions = [Action(Kind.FORWARD, stage, index) for index in range(ahead)]
        for index in range(micro_batches):
            if ahead + index < micro_batches:
                actions.append(Action(Kind.FORWARD, stage, ahead + index))
            actions.append(Action(Kind.BACKWARD, stage, index))
        orders.append(actions)
    return orders


def _interleaved(schedule: Schedule, micro_batches: int) -> list[list[Action]]:
    return _of_torch("Interleaved1F1B", schedule, _in_full_rounds(schedule, micro_batches), micro_batches)


def _interleaved_zero_bubble(schedule: Schedule, micro_batches: int) -> list[list[Action]]:
    return _of_torch("InterleavedZeroBubble", schedule, _in_full_rounds(schedule, micro_batches), micro_batches)


def _zbv(schedule: Schedule, micro_batches: int) -> list[list[Action]]:
    return _of_torch("ZBVZeroBubble", schedule, micro_batches, micro_batches)


def _in_full_rounds(schedule: Schedule, micro_batches: int) -> int:
    """The fewest micro-batches, and no fewer than these, of which each round of torch's schedule has as many."""
    return next(n for n in count(micro_batches) if n % max(1, n // schedule.degree) == 0)


SCHEDULES: Mapping[str, _Known] = {
    "gpipe": _Known((1, 1), _gpipe),
    "1f1b": _Known((1, 1), _one_forward_one_backward),
    "interleaved": _Known((2, None), _interleaved),
    "interleaved_zero_bubble": _Known((1, None), _interleaved_zero_bubble),
    "zbv": _Known((2, 2), _zbv, turns_back=True),
}
"""The schedules there are, by name."""

_KINDS = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.BACKWARD_INPUT, "W": Kind.BACKWARD_WEIGHT}


@lru_cache(maxsize=64)
def _order(schedule: Schedule, micro_batches: int, *, forward_only: bool) -> tuple[tuple[Action, ...], ...]:
    computed = [
        [action for action in actions if action.kind is Kind.FORWARD or not forward_only]
        for actions in SCHEDULES[schedule.name].computes(schedule, micro_batches)
    ]
    return tuple(map(tuple, _with_messages(computed, schedule)))


def _of_torch(name: str, schedule: Schedule, asked: int, micro_batches: int) -> list[list[Action]]:
    """What each place computes in torch's schedule of a name, without micro-batches that were only asked for."""
    by_place = _torch_order(name, schedule, asked)
    return [
        [
            Action(_KINDS[said.computation_type.value], said.stage_index, said.microbatch_index)
            for said in by_place[place]
            if said is not None and said.computation_type.value in _KINDS and said.microbatch_index < micro_batches
        ]
        for place in range(schedule.degree)
    ]


def _torch_order(name: str, schedule: Schedule, micro_batches: int) -> Mapping[int, Sequence[Any]]:
    """Torch's own list of actions for each place; None in it is a time in which a place waits.

    The schedule is made over stages that have no model: it looks at how many there are, and where.
    """
    from torch import nn
    from torch.distributed.pipelining.schedules import get_schedule_class

    made = get_schedule_class(name)
    stages = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=schedule.stages,
            group_size=schedule.degree,
            group_rank=0,
            is_first=stage == 0,
            is_last=stage == schedule.stages - 1,
            has_backward=True,
            submod=nn.Identity(),
        )
        for stage in schedule.stages_of(0)
    ]
    try:
        order: Mapping[int, Sequence[Any]] = made(stages, n_microbatches=micro_batches).pipeline_order
    except (AttributeError, TypeError) as error:
        raise PlanError(
            f"schedule={schedule.name!r} is torch's {made.__name__}, and that of torch {torch.__version__} does not "
            "say in which order it runs. Use torch 2.13, or schedule='1f1b'."
        ) from error
    return order


def _with_messages(computed: Sequence[Sequence[Action]], schedule: Schedule) -> list[list[Action]]:
    """Puts in sends and receives: both at once in the two lists, so that one order of all messages exists.

    Ranks take turns, each with at most one action; so a receive stands about where its message arrives.
    """
    places = schedule.places
    orders: list[list[Action]] = [[] for _ in computed]
    positions = [0] * len(computed)
    done: set[tuple[Kind, int, int]] = set()
    while any(position < len(actions) for position, actions in zip(positions, computed, strict=True)):
        ready = [
            place
            for place, actions in enumerate(computed)
            if positions[place] < len(actions) and _is_ready(actions[positions[place]], done, schedule.stages - 1)
        ]
        assert ready, f"No rank can go on in {schedule} after {positions} actions."
        for place in ready:
            action = computed[place][positions[place]]
            positions[place] += 1
            orders[place].append(action)
            done.add((_done_by(action), action.stage, action.index))
            for send, receive in _messages(action, schedule.stages - 1):
                if places[send.stage] != places[receive.stage]:
                    orders[places[send.stage]].append(send)
                    orders[places[receive.stage]].append(receive)
    return orders


def _done_by(action: Action) -> Kind:
    """Either way of a backward gives what the stage before waits for."""
    return Kind.BACKWARD_INPUT if action.kind is Kind.BACKWARD else action.kind


def _is_ready(action: Action, done: set[tuple[Kind, int, int]], last: int) -> bool:
    stage, index = action.stage, action.index
    if action.kind is Kind.FORWARD:
        return stage == 0 or (Kind.FORWARD, stage - 1, index) in done
    if action.kind is Kind.BACKWARD_WEIGHT:
        return (Kind.BACKWARD_INPUT, stage, index) in done
    after = (Kind.FORWARD, stage, index) if stage == last else (Kind.BACKWARD_INPUT, stage + 1, index)
    return after in done and (Kind.FORWARD, stage, index) in done


def _messages(action: Action, last: int) -> Iterator[tuple[Action, Action]]:
    """The send and the receive that follow an action, if any do."""
    stage, index = action.stage, action.index
    if action.kind is Kind.FORWARD and stage < last:
        yield Action(Kind.SEND_FORWARD, stage, index), Action(Kind.RECEIVE_FORWARD, stage + 1, index)
    if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and stage > 0:
        yield Action(Kind.SEND_BACKWARD, stage, index), Action(Kind.RECEIVE_BACKWARD, stage - 1, index)
