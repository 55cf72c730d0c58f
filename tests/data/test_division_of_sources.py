"""Every sample once, whatever the sizes: pain.md rows 48 to 50."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.utils.data import DataLoader

from paraflow.data import Batch, Division
from tests.data.reading import SOURCES, Numbers, first_tensor, flat, of, order, read, rows


@pytest.mark.parametrize("kind", SOURCES)
def test_ranks_and_micro_batches_see_each_sample_once_in_one_order(kind: str) -> None:
    for samples, size in product(range(1, 10), range(1, 5)):
        alone = [rows(batch) for batch in read(SOURCES[kind](samples, size))]
        assert sorted(flat(alone)) == list(range(samples))
        assert [len(step) for step in alone] == [min(size, samples - k) for k in range(0, samples, size)]
        for ranks, accumulate in product((1, 2, 3), (1, 2, 3)):
            parts = [
                read(SOURCES[kind](samples, size), ranks=ranks, rank=rank, accumulate=accumulate)
                for rank in range(ranks)
            ]
            _check_together(parts, alone, accumulate)


def _check_together(parts: list[list[Batch]], alone: list[list[int]], accumulate: int) -> None:
    assert {len(part) for part in parts} == {len(alone)}
    for number, expected in enumerate(alone):
        step = [part[number] for part in parts]
        assert order(step) == expected
        assert {batch.samples for batch in step} == {len(expected)}
        assert {batch.shares for batch in step} == {tuple(len(rows(batch)) for batch in step)}
        assert max(step[0].shares) - min(step[0].shares) <= 1
        assert {batch.last for batch in step} == {number == len(alone) - 1}
        assert {len(batch.micro_batches) for batch in step} == {min(accumulate, max(step[0].shares))}
        for batch in step:
            sizes = [micro.samples for micro in batch.micro_batches]
            assert max(sizes) - min(sizes) <= 1
            lengths = [len(first_tensor(micro.data)) for micro in batch.micro_batches]
            assert all(length == size for length, size in zip(lengths, sizes, strict=True) if size)
            # A stand-in counts nothing, and still holds something for forward to run on.
            assert all(length > 0 for length in lengths)


@pytest.mark.parametrize(
    ("ranks", "accumulate", "samples", "expected"),
    [
        (1, 1, 5, [[(0, 5)]]),
        (2, 1, 5, [[(0, 3)], [(3, 5)]]),
        (2, 2, 7, [[(0, 2), (2, 4)], [(4, 6), (6, 7)]]),
        (3, 2, 4, [[(0, 1), (1, 2)], [(2, 3), (3, 3)], [(3, 4), (4, 4)]]),
        (3, 2, 2, [[(0, 1)], [(1, 2)], [(2, 2)]]),
        (1, 3, 2, [[(0, 1), (1, 2)]]),
    ],
)
def test_division_by_hand(ranks: int, accumulate: int, samples: int, expected: list[list[tuple[int, int]]]) -> None:
    divided = [Division(ranks, rank, accumulate).micro_batches(samples) for rank in range(ranks)]
    assert divided == expected


def test_division_is_told() -> None:
    assert "64" in Division(2, 0, 2).describe(64)
    assert "16 a micro-batch × 2 accumulated × 2 data ranks" in Division(2, 0, 2).describe(64)
    assert "11 + 11 + 10" in Division(3).describe(32)
    assert "1 data rank" in Division().describe(8)
    assert "1 data ranks" not in Division().describe(8)


@pytest.mark.parametrize("kind", ["array", "dataset", "loader", "batch sampler", "stream"])
def test_as_it_lies_without_shuffle(kind: str) -> None:
    assert order(read(SOURCES[kind](9, 4))) == list(range(9))


@pytest.mark.parametrize("kind", [kind for kind in SOURCES if "shuffled" in kind])
def test_order_is_a_function_of_seed_and_epoch(kind: str) -> None:
    def of_epoch(epoch: int, seed: int) -> list[int]:
        torch.manual_seed(epoch * 7 + seed)  # the global state has no part in it
        return order(read(SOURCES[kind](50, 8), epoch=epoch, seed=seed))

    orders = {(epoch, seed): tuple(of_epoch(epoch, seed)) for epoch in (0, 1, 2) for seed in (0, 1, 2)}
    assert len(set(orders.values())) == 9
    assert all(sorted(seen) == list(range(50)) for seen in orders.values())
    source = SOURCES[kind](50, 8)
    torch.manual_seed(123)
    for epoch in (2, 0, 2):
        assert tuple(order(read(source, epoch=epoch, seed=1))) == orders[epoch, 1]


def test_order_does_not_depend_on_the_kind_of_input_or_on_workers() -> None:
    def loader(workers: int) -> DataLoader[torch.Tensor]:
        return DataLoader(Numbers(11), batch_size=4, shuffle=True, num_workers=workers)

    alone = [rows(batch) for batch in read(of(loader(0)), epoch=1, seed=3)]
    assert [rows(batch) for batch in read(SOURCES["array shuffled"](11, 4), epoch=1, seed=3)] == alone
    parts = [read(of(loader(2)), epoch=1, seed=3, ranks=2, rank=rank, accumulate=2) for rank in range(2)]
    _check_together(parts, alone, 2)


def test_a_rank_fetches_its_own_samples_only() -> None:
    fetched = []
    for rank in range(3):
        numbers = Numbers(12)
        batches = read(of(DataLoader(numbers, batch_size=6, shuffle=True)), ranks=3, rank=rank, accumulate=2)
        assert numbers.fetched == order(batches)
        fetched.append(numbers.fetched)
    assert sorted(flat(fetched)) == list(range(12))
