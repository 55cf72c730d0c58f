"""Which checkpoints stay, worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from paraflow.callbacks.retention import Retention

NAN = math.nan


def sequence(retention: Retention, values: list[float | None], failing: tuple[int, ...] = ()) -> list[list[int]]:
    """Saves at steps 10, 20, ...; what is on the disk after each, as a run with a writer would have it."""
    disk: list[list[int]] = []
    for place, value in enumerate(values, 1):
        step = 10 * place
        retention.add(step, value)
        if step in failing:  # the writer removes nothing then
            retention.drop([step])
        else:
            retention.drop(retention.unneeded())
        disk.append(list(retention.saved))
    return disk


@pytest.mark.parametrize(
    ("options", "values", "expected"),
    [
        # The last one and the best one.
        ({}, [3.0, 1.0, 2.0, 4.0], [[10], [20], [20, 30], [20, 40]]),
        ({}, [None, None, None], [[10], [20], [30]]),
        ({"keep": 2}, [None, None, None], [[10], [10, 20], [20, 30]]),
        # The two best: 1.0 and 2.0, and from the fifth on 0.5 and 1.0.
        (
            {"keep_best": 2},
            [3.0, 1.0, 2.0, 4.0, 0.5],
            [[10], [10, 20], [20, 30], [20, 30, 40], [20, 50]],
        ),
        ({"greatest": True}, [1.0, 3.0, 2.0], [[10], [20], [20, 30]]),
        # Of equals the first stays.
        ({}, [2.0, 2.0, 2.0], [[10], [10, 20], [10, 30]]),
        ({"greatest": True}, [2.0, 2.0, 2.0], [[10], [10, 20], [10, 30]]),
        ({"keep_best": 2}, [2.0, 2.0, 2.0], [[10], [10, 20], [10, 20, 30]]),
        # What is not a number is never the best; infinity is one, and the worst there is.
        ({}, [NAN, NAN, 5.0, NAN], [[10], [20], [30], [30, 40]]),
        ({}, [5.0, NAN, 6.0], [[10], [10, 20], [10, 30]]),
        ({}, [math.inf, 5.0, 6.0], [[10], [20], [20, 30]]),
        ({"greatest": True}, [math.inf, 5.0], [[10], [10, 20]]),
        # A step without a value (saved between two validations) is not the best.
        ({}, [2.0, None, 1.0, None, None], [[10], [10, 20], [30], [30, 40], [30, 50]]),
    ],
)
def test_sequences(options: dict[str, Any], values: list[float | None], expected: list[list[int]]) -> None:
    assert sequence(Retention(**options), values) == expected


def test_a_best_that_a_failed_save_would_have_pushed_out_comes_back() -> None:
    retention = Retention(keep=1, keep_best=1)
    retention.add(10, 2.0)
    retention.add(20, 1.0)
    assert retention.unneeded() == [10]
    assert retention.bests() == [(1.0, 20)]
    retention.drop([20])  # it could not be written
    assert retention.saved == [10]
    assert retention.bests() == [(2.0, 10)]
    assert retention.unneeded() == []


@pytest.mark.parametrize(
    ("values", "failing", "expected"),
    [
        ([2.0, 1.0, 3.0], (20,), [[10], [10], [10, 30]]),
        ([2.0, 3.0, 4.0], (20, 30), [[10], [10], [10]]),
        ([2.0, 1.0, 3.0, 0.5], (10, 40), [[], [20], [20, 30], [20, 30]]),
        ([None, None, None], (20,), [[10], [10], [30]]),
    ],
)
def test_failed_saves(values: list[float | None], failing: tuple[int, ...], expected: list[list[int]]) -> None:
    assert sequence(Retention(), values, failing) == expected


def test_a_step_that_is_saved_again_counts_once_with_its_new_value() -> None:
    retention = Retention(keep=2)
    for step, value in ((10, 1.0), (20, 2.0), (10, 3.0)):
        retention.add(step, value)
    assert retention.saved == [20, 10]
    assert retention.bests() == [(2.0, 20)]
    retention.add(20, None)
    assert retention.bests() == [(3.0, 10)]


def test_state_goes_on_as_if_there_had_been_no_stop() -> None:
    values = [3.0, 1.0, NAN, 2.0, 1.0, 0.5, None]
    whole, first = Retention(keep=2, keep_best=2), Retention(keep=2, keep_best=2)
    expected = sequence(whole, values)
    sequence(first, values[:4])
    second = Retention(keep=2, keep_best=2)
    second.load_state_dict(first.state_dict())
    for place, value in enumerate(values[4:], 5):
        second.add(10 * place, value)
        second.drop(second.unneeded())
    assert second.saved == expected[-1]
    assert second.state_dict() == whole.state_dict()
    second.reset()
    assert second.state_dict() == {"saved": [], "values": {}, "best_step": None}


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep": 1.5}, {"keep_best": 0}, {"keep_best": -1}])
def test_the_last_and_the_best_always_stay(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1"):
        Retention(**options)
