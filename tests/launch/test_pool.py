from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, RankError


def _sum_of_ranks(extra: int) -> tuple[int, int, float]:
    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank() + extra)
    dist.all_reduce(total)
    os.environ["LEFT_BEHIND"] = "1"
    return os.getpid(), int(total), float(torch.rand(()))


def _what_is_left() -> tuple[bool, str | None, int]:
    return dist.is_initialized(), os.environ.get("LEFT_BEHIND"), os.getpid()


def _raise_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        raise ValueError("this rank fails")
    time.sleep(60)


def _sleep() -> None:
    time.sleep(60)


def test_ranks_form_a_fresh_world_in_each_call_and_live_on(ranks: Pool) -> None:
    two = ranks(2, _sum_of_ranks, 10)
    assert [total for _, total, _ in two] == [21, 21]
    assert two[0][2] == two[1][2]
    again = ranks(2, _sum_of_ranks, extra=0)
    assert [total for _, total, _ in again] == [1, 1]
    assert [pid for pid, _, _ in again] == [pid for pid, _, _ in two]
    assert again[0][2] == two[0][2]
    assert ranks(2, _what_is_left) == [(False, None, pid) for pid, _, _ in two]


def test_a_failure_names_its_rank_and_the_next_call_starts_anew() -> None:
    pool = Pool()
    try:
        with pytest.raises(RankError, match=r"After 0\.2 seconds these ranks had not returned: \[0\]"):
            pool(1, _sleep, timeout=0.2)
        begin = time.monotonic()
        with pytest.raises(RankError, match=r"(?s)rank 1 raised:\nTraceback .*ValueError: this rank fails"):
            pool(2, _raise_on, 1)
        assert time.monotonic() - begin < 30
        assert pool.workers == []
    finally:
        pool.close()
