"""The orders of a pipeline's ranks: complete, possible, and without a circle of waiting, for every schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest

from paraflow.errors import PlanError
from paraflow.pipelining.orders import BACKWARDS, SCHEDULES, Action, Kind, Schedule, receive_early, why_not
from paraflow.plan import Plan
from paraflow.plugins.pipeline import Pipeline
from paraflow.rules import Facts

CASES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("interleaved_zero_bubble", 1),
    ("interleaved_zero_bubble", 2),
    ("zbv", 2),
]
COUNTS = (1, 2, 3, 5, 8, 11)
DEGREES = (1, 2, 4, 8)
SENDS = {Kind.SEND_FORWARD: (Kind.RECEIVE_FORWARD, 1), Kind.SEND_BACKWARD: (Kind.RECEIVE_BACKWARD, -1)}


def schedules() -> Iterator[tuple[Schedule, int]]:
    for name, chunks in CASES:
        for degree in DEGREES:
            for count in COUNTS:
                yield Schedule(name, degree, chunks), count


def partner(send: Action) -> Action:
    kind, step = SENDS[send.kind]
    return Action(kind, send.stage + step, send.index)


def possible(action: Action, done: set[Action], schedule: Schedule) -> bool:
    """Whether what an action needs is there: on its own rank, by a message or from another stage of the rank."""

    def has(kinds: Sequence[Kind], step: int) -> bool:
        return any(Action(kind, action.stage + step, action.index) in done for kind in kinds)

    halves = [Kind.BACKWARD, Kind.BACKWARD_INPUT]
    if action.kind is Kind.FORWARD:
        return action.stage == 0 or has([Kind.RECEIVE_FORWARD], 0) or has([Kind.FORWARD], -1)
    if action.kind in halves:
        arrived = has([Kind.RECEIVE_BACKWARD], 0) or has(halves, 1)
        return has([Kind.FORWARD], 0) and (action.stage == schedule.stages - 1 or arrived)
    if action.kind is Kind.BACKWARD_WEIGHT:
        return has([Kind.BACKWARD_INPUT], 0)
    return has([Kind.FORWARD], 0) if action.kind is Kind.SEND_FORWARD else has(halves, 0)


def run_with_messages_that_wait(schedule: Schedule, order: Sequence[Sequence[Action]]) -> None:
    """Runs orders where a send ends only when its receive begins, the strictest that a network can be."""
    places, at = schedule.places, [0] * len(order)
    done: list[set[Action]] = [set() for _ in order]
    while any(at[place] < len(actions) for place, actions in enumerate(order)):
        moved = False
        for place, actions in enumerate(order):
            if at[place] == len(actions):
                continue
            action = actions[at[place]]
            if action.kind in SENDS:
                receive = partner(action)
                peer = places[receive.stage]
                if peer != place and at[peer] < len(order[peer]) and order[peer][at[peer]] == receive:
                    assert possible(action, done[place], schedule), f"{action} before it is there, in {schedule}"
                    done[place].add(action)
                    done[peer].add(receive)
                    at[place], at[peer], moved = at[place] + 1, at[peer] + 1, True
            elif action.kind not in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD):
                assert possible(action, done[place], schedule), f"{action} is too early in {schedule}"
                done[place].add(action)
                at[place], moved = at[place] + 1, True
        assert moved, f"Every rank waits in {schedule}, after {at} actions"


def test_every_order_runs_to_its_end_with_messages_that_wait() -> None:
    for schedule, count in schedules():
        run_with_messages_that_wait(schedule, schedule.order(count))
        run_with_messages_that_wait(schedule, schedule.forward_order(count))


def run_with_messages_that_are_kept(schedule: Schedule, order: Sequence[Sequence[Action]]) -> None:
    """Runs orders where only what computes with a message waits for it."""
    at, done, asked = [0] * len(order), set[Action](), set[Action]()
    while any(at[place] < len(actions) for place, actions in enumerate(order)):
        moved = False
        for place, actions in enumerate(order):
            while at[place] < len(actions) and (
                (action := actions[at[place]]).kind in RECEIVES or possible(action, asked & done | own(done), schedule)
            ):
                (asked if action.kind in RECEIVES else done).add(action)
                done.update([partner(action)] if action.kind in SENDS else [])
                at[place], moved = at[place] + 1, True
        assert moved, f"Every rank waits in {schedule}"


RECEIVES = (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)


def own(done: set[Action]) -> set[Action]:
    return {action for action in done if action.kind not in RECEIVES}


def test_receives_can_be_begun_early() -> None:
    for schedule, count in schedules():
        if count > 5:
            continue
        order = schedule.order(count)
        early = [receive_early(actions, 2) for actions in order]
        run_with_messages_that_are_kept(schedule, early)
        for actions, moved in zip(order, early, strict=True):
            for kinds in (RECEIVES, set(Kind) - set(RECEIVES)):
                assert [a for a in actions if a.kind in kinds] == [a for a in moved if a.kind in kinds]
            assert receive_early(actions, 0) == actions


def test_every_forward_and_backward_is_run_once_where_its_stage_is() -> None:
    for schedule, count in schedules():
        ran = Counter[tuple[str, int, int]]()
        for place, actions in enumerate(schedule.order(count)):
            for action in actions:
                assert schedule.places[action.stage] == place
                if action.kind in (Kind.FORWARD, *BACKWARDS):
                    ran[action.kind.value, action.stage, action.index] += 1
        assert set(ran.values()) == {1}
        for stage in range(schedule.stages):
            for index in range(count):
                whole = (Kind.BACKWARD.value, stage, index) in ran
                halves = [(kind, stage, index) in ran for kind in ("backward_input", "backward_weight")]
                assert (Kind.FORWARD.value, stage, index) in ran
                assert halves == [not whole, not whole]


def test_messages_cross_each_boundary_between_ranks_once_and_none_within_a_rank() -> None:
    for schedule, count in schedules():
        places = schedule.places
        between = sum(here != there for here, there in pairwise(places))
        actions = [action for actions in schedule.order(count) for action in actions]
        kinds = Counter(action.kind for action in actions)
        expected = between * count
        assert [kinds[kind] for kind in (*SENDS, Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)] == [expected] * 4
        forward = [action.kind for actions in schedule.forward_order(count) for action in actions]
        assert not set(forward) & {*BACKWARDS, Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD}


def test_1f1b_keeps_no_more_micro_batches_than_there_are_stages_from_here_on() -> None:
    for degree in DEGREES:
        for count in COUNTS:
            for stage, actions in enumerate(Schedule("1f1b", degree).order(count)):
                kept, most = 0, 0
                for action in actions:
                    kept += (action.kind is Kind.FORWARD) - (action.kind is Kind.BACKWARD)
                    most = max(most, kept)
                assert most == min(count, degree - stage)


def test_stages_are_dealt_round_or_there_and_back() -> None:
    assert Schedule("interleaved", 3, 2).places == (0, 1, 2, 0, 1, 2)
    assert Schedule("zbv", 3, 2).places == (0, 1, 2, 2, 1, 0)
    assert Schedule("zbv", 3, 2).stages_of(1) == (1, 4)


@pytest.mark.parametrize(
    ("name", "chunks", "rule", "remedy"),
    [
        ("1f2b", 1, "pipeline-schedule-unknown", "'1f1b'"),
        ("gpipe", 2, "pipeline-chunks", "schedule='interleaved'"),
        ("1f1b", 3, "pipeline-chunks", "chunks=1"),
        ("interleaved", 1, "pipeline-chunks", "chunks=2, or schedule='1f1b'"),
        ("zbv", 1, "pipeline-chunks", "chunks=2"),
        ("zbv", 3, "pipeline-chunks", "schedule='interleaved'"),
        ("interleaved_zero_bubble", 0, "pipeline-chunks", "chunks=1"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_with_a_remedy(name: str, chunks: int, rule: str, remedy: str) -> None:
    refusal = why_not(name, 2, chunks)
    assert refusal is not None
    assert refusal.id == rule
    assert remedy in refusal.remedy
    with pytest.raises(PlanError, match="Write") as raised:
        Schedule(name, 2, chunks)
    assert raised.value.rule == rule


def test_no_schedule_is_refused_for_its_number_of_micro_batches() -> None:
    assert {name for name, _ in CASES} == set(SCHEDULES)
    for schedule, count in schedules():
        assert all(schedule.order(count))


@pytest.mark.parametrize(("name", "chunks", "refused"), [("zbv", 2, True), ("interleaved", 2, False)])
def test_a_backward_in_halves_is_refused_with_recomputation(name: str, chunks: int, refused: bool) -> None:
    facts = Facts(plan=Plan(pp=2, activation_checkpointing="full"), world_size=2)
    broken = [rule.id for rule in Pipeline(2, schedule=name, chunks=chunks).rules if rule.broken(facts)]
    assert ("pipeline-recomputed-halves" in broken) == refused
