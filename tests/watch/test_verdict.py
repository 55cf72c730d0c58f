"""Who is waited for, from where each rank is."""

from __future__ import annotations

import pytest

from paraflow.watch.position import Position
from paraflow.watch.verdict import judge


def waits(rank: int, sequence: int) -> Position:
    where = f"all_reduce(float[4]), number {sequence}"
    return Position(rank, 5, 60.0, "train.py:9 in <module>", where, "gloo 0", sequence)


def busy(rank: int, sequence: int) -> Position:
    return Position(rank, 5, 61.0, f"train.py:{rank} in training_step", None)


@pytest.mark.parametrize(
    ("positions", "left", "missing", "hopeless", "head"),
    [
        ([waits(0, 7), busy(1, 6)], {}, (1,), True, "rank 0 waits for rank 1."),
        ([waits(0, 7), waits(2, 7)], {}, (1,), True, "ranks 0, 2 wait for rank 1."),
        ([waits(0, 7), waits(1, 8), waits(2, 8)], {}, (0,), True, "ranks 1, 2 wait for rank 0."),
        ([waits(0, 7), waits(1, 7), waits(2, 7)], {}, (), True, "All ranks wait"),
        ([busy(0, 7), busy(1, 7)], {}, (0, 1), False, "No rank waits for another"),
        ([waits(0, 7)], {1: "it is done"}, (1,), True, "rank 0 waits for rank 1."),
    ],
)
def test_who_is_missing(
    positions: list[Position], left: dict[int, str], missing: tuple[int, ...], hopeless: bool, head: str
) -> None:
    world_size = max([2, *(position.rank + 1 for position in positions)])
    verdict = judge(positions, left, world_size)
    assert (verdict.missing, verdict.hopeless) == (missing, hopeless)
    assert verdict.text.startswith(head)
    for position in positions:
        assert str(position) in verdict.text
    for rank, why in left.items():
        assert f"rank {rank}: has left the run: {why}" in verdict.text


def test_a_rank_that_says_nothing_is_told_apart() -> None:
    assert "rank 1: does not answer" in judge([waits(0, 7)], {}, 2).text
