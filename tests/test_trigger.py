from __future__ import annotations

import time

import torch

from paraflow.interval import Interval
from paraflow.mesh import Mesh
from paraflow.plan import Plan
from paraflow.trigger import Trigger
from tests.pool import Pool


def test_steps() -> None:
    trigger = Trigger(Interval.parse("3st"))
    assert [step for step in range(1, 10) if trigger.at_step(step)] == [3, 6, 9]
    assert not any(trigger.at_epoch(epoch) for epoch in range(1, 10))


def test_steps_after_a_resume_are_those_of_the_whole_run() -> None:
    trigger = Trigger(Interval.parse(4))
    trigger.start(6)
    assert [step for step in range(7, 17) if trigger.at_step(step)] == [8, 12, 16]


def test_epochs() -> None:
    trigger = Trigger(Interval.parse("2ep"))
    assert [epoch for epoch in range(1, 8) if trigger.at_epoch(epoch)] == [2, 4, 6]
    assert not any(trigger.at_step(step) for step in range(1, 10))


def test_time_begins_anew_when_it_has_passed() -> None:
    trigger = Trigger(Interval.parse("0.1s"))
    trigger.start(0)
    began, fired = time.monotonic(), []
    for step in range(1, 70):
        time.sleep(0.005)
        if trigger.at_step(step):
            fired.append(time.monotonic() - began)
    assert not any(trigger.at_epoch(epoch) for epoch in range(1, 5))
    gaps = [later - earlier for earlier, later in zip([0.0, *fired], fired, strict=False)]
    assert len(fired) >= 2
    assert min(gaps) >= 0.1


def test_time_is_asked_for_seldom_when_it_is_far() -> None:
    asked = []

    def agree(value: float) -> float:
        asked.append(value)
        return value

    trigger = Trigger(Interval.parse("1h"), agree)
    trigger.start(0)
    assert not any(trigger.at_step(step) for step in range(1, 10_000))
    assert len(asked) < 20


def _fired(seconds_a_step: list[float], interval: str, steps: int) -> list[int]:
    mesh = Mesh(Plan(dp=len(seconds_a_step)), torch.device("cpu"))
    trigger = Trigger(Interval.parse(interval), mesh.broadcast)
    time.sleep(0.05 * mesh.rank)  # ranks do not begin at the same moment
    trigger.start(0)
    fired = []
    for step in range(1, steps + 1):
        time.sleep(seconds_a_step[mesh.rank])
        if trigger.at_step(step):
            fired.append(step)
    return fired


def test_ranks_agree_on_time_at_every_step(ranks: Pool) -> None:
    slow, fast = ranks(2, _fired, [0.004, 0.0005], "0.06s", 120)
    assert slow == fast
    assert len(slow) >= 3


def test_one_process_looks_at_its_clock_at_each_step() -> None:
    """However fast the steps before were."""
    trigger = Trigger(Interval.parse("0.2s"))
    trigger.start(0)
    assert not any(trigger.at_step(step) for step in range(1, 5000))
    time.sleep(0.25)
    assert trigger.at_step(5000)


def test_many_ranks_ask_no_more_than_a_second_ahead() -> None:
    asked: list[float] = []

    def agree(value: float) -> float:
        asked.append(value)
        return value

    trigger = Trigger(Interval.parse("1h"), agree)
    trigger.start(0)
    time.sleep(0.01)
    assert not trigger.at_step(1)
    assert 1 <= asked[0] <= 110  # at the pace of a step in 10 ms or more
    trigger.ask_soon()
    assert not trigger.at_step(2)
    assert len(asked) == 2
