"""Streams that are split over ranks already: pain.md row 48."""

from __future__ import annotations

import pytest
import torch

from paraflow.data import Division, PerRank, Reader, as_source
from paraflow.errors import DataError
from paraflow.mesh import Mesh
from paraflow.plan import Plan
from tests.data.reading import order, read
from tests.pool import Pool, RankError

SIZES = [[3, 1, 2], [2, 2], [4]]


def _read_my_stream(sizes: list[list[int]], accumulate: int, start: int) -> list[tuple[list[int], object]]:
    mesh = Mesh(Plan(dp=len(sizes)), torch.device("cpu"))
    mine = torch.arange(sum(sizes[mesh.rank])) + 100 * mesh.rank
    source = as_source(PerRank(list(torch.split(mine, sizes[mesh.rank]))), batch_size=None, shuffle=False)
    reader = Reader(Division(len(sizes), mesh.data_rank, accumulate), 0, mesh.gather_numbers)
    batches = list(source.read(0, start, reader))
    return [(order([b]), (b.samples, b.shares, b.last, len(b.micro_batches))) for b in batches]


def test_ranks_of_different_lengths_go_together(ranks: Pool) -> None:
    parts = ranks(3, _read_my_stream, SIZES, 2, 0)
    steps = [(9, (3, 2, 4), False, 2), (3, (1, 2, 0), False, 2), (2, (2, 0, 0), True, 2)]
    assert [[told for _, told in part] for part in parts] == [steps] * 3
    assert [[seen for seen, _ in part] for part in parts] == [
        [[0, 1, 2], [3], [4, 5]],
        [[100, 101], [102, 103], []],
        [[200, 201, 202, 203], [], []],
    ]
    rest = ranks(3, _read_my_stream, SIZES, 2, 9)
    assert rest == [part[1:] for part in parts]


def test_a_rank_without_any_batch_is_refused(ranks: Pool) -> None:
    with pytest.raises(RankError, match="Data rank 1 has no batch at all"):
        ranks(2, _read_my_stream, [[2], []], 1, 0)


def test_alone_it_is_a_stream() -> None:
    source = as_source(PerRank([torch.arange(3), torch.arange(3, 4)]), batch_size=None, shuffle=False)
    batches = read(source, accumulate=2)
    assert order(batches) == [0, 1, 2, 3]
    assert [[micro.samples for micro in batch.micro_batches] for batch in batches] == [[2, 1], [1]]


def test_no_batch_at_all_is_refused_by_the_feed() -> None:
    from paraflow.data import Feed

    source = as_source(PerRank(list), batch_size=None, shuffle=False)
    with pytest.raises(DataError, match="gave no batch"):
        list(Feed(source, Reader(), torch.device("cpu")))
