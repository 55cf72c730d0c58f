"""The position is an index: pain.md rows 20 to 24."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from paraflow.data import Division, Feed, Reader, Source
from paraflow.errors import DataError
from tests.data.reading import SOURCES, Numbers, of, order, read, rows, together

CPU = torch.device("cpu")


def feed(source: Source, ranks: int = 1, rank: int = 0, seed: int = 0) -> Feed:
    return Feed(source, Reader(Division(ranks, rank), seed), CPU, "training data")


@pytest.mark.parametrize("kind", SOURCES)
def test_reading_from_a_position_gives_the_rest(kind: str) -> None:
    whole = read(SOURCES[kind](11, 3), epoch=2)
    for steps in range(4):
        rest = read(SOURCES[kind](11, 3), epoch=2, start=3 * steps)
        assert [rows(batch) for batch in rest] == [rows(batch) for batch in whole[steps:]]
        assert [batch.last for batch in rest] == [False] * (3 - steps) + [True]


@pytest.mark.parametrize("own_batches", [False, True])
def test_what_is_skipped_is_not_fetched(own_batches: bool) -> None:
    def loader(numbers: Numbers) -> DataLoader[Any]:
        if own_batches:
            return DataLoader(numbers, batch_sampler=BatchSampler(RandomSampler(numbers), 3, False))
        return DataLoader(numbers, batch_size=3, shuffle=True)

    whole = order(read(of(loader(Numbers(11))), epoch=1))
    numbers = Numbers(11)
    read(of(loader(numbers)), epoch=1, start=6)
    assert numbers.fetched == whole[6:]


@pytest.mark.parametrize("kind", SOURCES)
def test_position_moves_with_the_batches_and_is_saved(kind: str) -> None:
    reading = feed(SOURCES[kind](7, 3))
    assert reading.state_dict() == {"epoch": 0, "position": 0, "seed": 0}
    places = [(reading.epoch, reading.position) for _ in reading]
    assert places == [(0, 3), (0, 6), (1, 0)]
    expected = [rows(batch) for batch in read(SOURCES[kind](7, 3), epoch=1)]
    batches = iter(reading)
    assert rows(next(batches)) == expected[0]
    resumed = feed(SOURCES[kind](7, 3))
    resumed.load_state_dict(reading.state_dict())
    assert [rows(batch) for batch in resumed] == expected[1:]
    assert (resumed.epoch, resumed.position) == (2, 0)


def test_position_survives_a_change_of_ranks() -> None:
    source = SOURCES["dataset shuffled"]
    expected = [rows(batch) for batch in read(source(20, 6))]
    before = [feed(source(20, 6), 3, rank) for rank in range(3)]
    steps = [iter(reading) for reading in before]
    assert order([next(step) for step in steps]) == expected[0]
    states = [reading.state_dict() for reading in before]
    assert states[0] == states[1] == states[2]
    after = [feed(source(20, 6), 2, rank) for rank in range(2)]
    for reading in after:
        reading.load_state_dict(states[0])
    assert together(after) == expected[1:]


def test_another_seed_is_refused() -> None:
    with pytest.raises(DataError, match=r"seed 3.*seed 0.*Trainer\(seed=3\)"):
        feed(SOURCES["array"](4, 2)).load_state_dict({"epoch": 0, "position": 2, "seed": 3})


def test_an_iterator_lasts_one_epoch() -> None:
    reading = feed(of(iter([torch.arange(3), torch.arange(3, 5)])))
    assert order(list(reading)) == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match=r"training data.*iterator can be read only once.*function"):
        list(reading)


def test_an_empty_stream_is_refused() -> None:
    with pytest.raises(DataError, match=r"training data gave no batch.*empty"):
        list(feed(of(lambda: iter([]))))


@pytest.mark.parametrize("kind", ["array", "dataset", "batch sampler", "stream"])
def test_a_position_beyond_the_data_is_refused(kind: str) -> None:
    # The data has become shorter since the position was saved; giving nothing would let a run wait for ever.
    reading = feed(SOURCES[kind](4, 2))
    reading.load_state_dict({"epoch": 0, "position": 6, "seed": 0})
    with pytest.raises(DataError):
        list(reading)


@pytest.mark.parametrize("kind", [*SOURCES, "random batches", "one by one", "workers"])
def test_reading_leaves_the_global_random_state_alone(kind: str) -> None:
    numbers = Numbers(8)
    others: dict[str, DataLoader[Any]] = {
        "random batches": DataLoader(numbers, batch_sampler=BatchSampler(RandomSampler(numbers), 3, False)),
        "one by one": DataLoader([torch.zeros(2, 1)] * 8, batch_size=None, shuffle=True),  # type: ignore[arg-type]
        "workers": DataLoader(numbers, batch_size=3, shuffle=True, num_workers=1),
    }
    source = of(others[kind]) if kind in others else SOURCES[kind](8, 3)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for epoch in range(2):
        read(source, epoch=epoch, ranks=2, rank=1)
    assert torch.equal(torch.get_rng_state(), before)
