from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import paraflow as pf
from paraflow.callbacks.batch_size_finder import BatchSizeFinder
from paraflow.profiler.attempt import attempt, is_out_of_memory, seconds_of
from tests.callbacks.traces import Network, arrays, difference, left_by, network
from tests.plugins.toy_shard import ToyShard
from tests.pool import Pool

CPU = torch.device("cpu")


class Bounded(nn.Module):
    """Fits in memory up to so many samples at once; beyond, it asks for more than any machine has."""

    def __init__(self, most: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.most = most
        self.seen: list[int] = []
        pf.configure(self, optimizer="sgd", lr=0.1, momentum=0.9)

    def training_step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        self.seen.append(len(x))
        loss = nn.functional.cross_entropy(self.layer(x), y)
        if len(x) > self.most:
            loss = loss + torch.empty(2**50).sum()
        return loss


def find(model: nn.Module, data: Any, batch_size: int | None = 4, **options: Any) -> tuple[BatchSizeFinder, str]:
    out = io.StringIO()
    finder = BatchSizeFinder(seconds=0.0, **options)
    trainer = pf.Trainer(max_steps=1, callbacks=[finder])
    trainer.console = Console(file=out, width=300)
    trainer.fit(model, data, **({} if batch_size is None else {"batch_size": batch_size}))
    return finder, out.getvalue()


def test_sizes_double_until_memory_runs_out() -> None:
    model = Bounded(most=9)
    finder, text = find(model, arrays(64))
    assert finder.curve["size"] == [1, 2, 4, 8]
    assert finder.largest == 8
    assert "16 do not fit in memory" in text
    # Three runs of each size that fits, one of the size that does not, and then the training.
    assert model.seen == [1, 1, 1, 2, 2, 2, 4, 4, 4, 8, 8, 8, 16, 4]
    fast_enough = [
        n for n, rate in zip(*finder.curve.values(), strict=True) if rate >= 0.95 * max(finder.curve["rate"])
    ]
    assert finder.suggestion == fast_enough[0]
    rows = [line.split() for line in text.splitlines() if re.match(r"\d+ ", line)]
    assert [row[0] for row in rows] == ["1", "2", "4", "8"]
    assert f"batch_size=4 that is accumulate={-(-4 // finder.suggestion)}" in text


@pytest.mark.parametrize(
    ("options", "count", "sizes", "ended"),
    [
        ({"high": 6}, 64, [1, 2, 4], "the greatest size is 6"),
        ({"low": 3, "high": 12}, 64, [3, 6, 12], "the greatest size is 12"),
        ({}, 8, [1, 2, 4, 8], "the greatest size is 8"),
        ({}, 13, [1, 2, 4, 8], "there are fewer than 16 samples"),
    ],
)
def test_sizes_end_where_they_should(options: dict[str, int], count: int, sizes: list[int], ended: str) -> None:
    finder, _ = find(Bounded(most=999), arrays(count), **options)
    assert finder.curve["size"] == sizes
    assert finder.ended == ended
    assert finder.largest == sizes[-1]


def test_where_nothing_fits_nothing_is_suggested() -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory"):  # of the training itself, which goes on
        find(Bounded(most=0), arrays(8))
    finder = BatchSizeFinder(low=4, high=8, seconds=0.0)
    pf.Trainer(max_steps=1, callbacks=[finder], progress=False).fit(Bounded(most=2), arrays(8), batch_size=2)
    assert (finder.suggestion, finder.largest, finder.curve["size"]) == (None, None, [])
    assert finder.ended == "4 do not fit in memory"


def test_other_errors_are_raised() -> None:
    class Broken(Bounded):
        def training_step(self, batch: Any) -> torch.Tensor:
            raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        find(Broken(most=9), arrays(8))


def test_batch_norm_begins_at_two() -> None:
    finder, _ = find(network(), arrays(8))
    assert finder.curve["size"] == [2, 4, 8]


def test_ready_made_batches_are_not_read() -> None:
    x, y = arrays(8)
    model = Bounded(most=99)
    finder, text = find(model, [(x, y)], batch_size=None)
    assert finder.suggestion is None
    assert model.seen == [8]
    assert "no suggestion, for batches come ready-made" in text


def _one_rank_runs_out() -> tuple[Any, ...]:
    model = Bounded(most=4 if os.environ["RANK"] == "1" else 99)
    finder, text = find(model, arrays(32))
    tried = sorted(set(model.seen[:-1]))
    return finder.curve["size"], finder.curve["rate"], finder.suggestion, finder.largest, finder.ended, tried, text


def test_ranks_agree_where_only_one_runs_out(ranks: Pool) -> None:
    one, other = ranks(2, _one_rank_runs_out)
    assert one[:-1] == other[:-1]
    sizes, _, suggestion, largest, ended, tried, text = one
    assert sizes == [1, 2, 4]
    assert largest == 4
    assert suggestion in sizes
    assert ended == "8 do not fit in memory"
    assert tried == [1, 2, 4, 8]
    assert "4 the largest that ran" in text
    assert "micro-batch" not in other[-1].replace("a micro-batch", "")


class BoundedNetwork(Network):
    """Has statistics, dropout and momentum, and runs out of memory above 8 samples on the last rank."""

    def training_step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        if len(x) > 8 and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
            loss = loss + torch.empty(2**50).sum()
        return loss


def _bounded_network() -> nn.Module:
    return pf.configure(BoundedNetwork(), optimizer="sgd", lr=0.1, momentum=0.9, schedule="cosine")


def _with_and_without(plan: dict[str, Any]) -> tuple[str, int | None]:
    finder = BatchSizeFinder(seconds=0.0)
    with_it = left_by([finder], model=_bounded_network(), **plan)
    return difference(with_it, left_by([], model=_bounded_network(), **plan)), finder.largest


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("plan", [{}, {"precision": "fp16"}, {"data": "dataset"}], ids=["plain", "fp16", "dataset"])
def test_no_trace_is_left(ranks: Pool, world_size: int, plan: dict[str, Any]) -> None:
    for where, largest in ranks(world_size, _with_and_without, plan):
        assert where == ""
        assert largest == 8


def _sharded() -> tuple[str, list[float]]:
    model = pf.configure(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), loss="cross_entropy", optimizer="sgd")
    finder = BatchSizeFinder()
    trainer = pf.Trainer(max_steps=1, callbacks=[finder], plugins=[ToyShard(2)], progress=False)
    trainer.fit(model, arrays(8), batch_size=8)
    return finder.ended, finder.curve["size"]


def test_a_model_spread_over_ranks_is_not_measured(ranks: Pool) -> None:
    assert ranks(2, _sharded) == [("the model is spread over ranks, so one rank cannot measure it", [])] * 2


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    _, text = find(Bounded(most=99), arrays(16), folder=tmp_path / "new")
    picture = tmp_path / "new" / "batch-size.png"
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert str(picture) in text


def test_a_resumed_run_is_not_measured(tmp_path: Path) -> None:
    saving = pf.callbacks.Checkpoint(tmp_path)
    pf.Trainer(max_epochs=1, callbacks=[saving], progress=False).fit(Bounded(most=99), arrays(8), batch_size=4)
    finder = BatchSizeFinder(seconds=0.0)
    trainer = pf.Trainer(max_epochs=2, callbacks=[finder], progress=False)
    trainer.fit(Bounded(most=99), arrays(8), batch_size=4, resume=tmp_path)
    assert finder.curve["size"] == []


def test_running_out_of_memory_is_told_from_other_errors() -> None:
    assert attempt(lambda: torch.empty(2**50), CPU) is None
    assert seconds_of(lambda: torch.empty(2**50), CPU) is None
    assert attempt(lambda: 3, CPU) == 3
    assert (seconds_of(lambda: None, CPU) or 0.0) >= 0.0
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(ValueError, match="other"):
        attempt(_raise_other, CPU)


def _raise_other() -> None:
    raise ValueError("other")


@pytest.mark.parametrize("sizes", [{"low": 0}, {"low": 4, "high": 2}])
def test_sizes_that_are_none_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="low and high must be sizes of at least 1"):
        BatchSizeFinder(**sizes)
