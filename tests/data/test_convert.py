from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from paraflow.data import PerRank
from tests.data.reading import Numbers, flat, generator_of, of, order, read, rows, together


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Loose:
    x: Any
    y: Any


@dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any


X, Y = np.arange(10, dtype=np.float64).reshape(5, 2), np.arange(5)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("torch_tensors", [False, True])
@pytest.mark.parametrize("make", [Pair, Loose, Frozen, lambda x, y: (x, y), lambda x, y: {"x": x, "y": {"z": y}}])
def test_trees_of_arrays_keep_their_shape_and_their_rows_together(
    make: Any, torch_tensors: bool, shuffle: bool
) -> None:
    x, y = (torch.from_numpy(X).float(), torch.from_numpy(Y)) if torch_tensors else (X, Y)
    batches = read(of(make(x, y), 2, shuffle))
    assert len(batches) == 3
    seen = []
    for batch in batches:
        data = batch.micro_batches[0].data
        assert type(data) is type(make(x, y))
        mine_x, mine_y = (data["x"], data["y"]["z"]) if isinstance(data, dict) else tuple(_fields(data))
        assert mine_x.dtype == torch.float32
        assert mine_y.dtype == torch.int64
        assert torch.equal(mine_x, torch.stack([mine_y * 2.0, mine_y * 2.0 + 1], dim=1))
        seen += mine_y.tolist()
    assert sorted(seen) == list(range(5))


def _fields(data: Any) -> Iterator[Any]:
    yield from (data if isinstance(data, tuple) else (data.x, data.y))


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.zeros(3, np.float64), torch.float32),
        (np.zeros(3, np.float32), torch.float32),
        (np.zeros(3, np.float16), torch.float16),
        (np.zeros(3, np.uint8), torch.uint8),
        (np.zeros(3, bool), torch.bool),
        (np.arange(3)[::-1], torch.int64),
        (torch.zeros(3, dtype=torch.float64), torch.float64),
    ],
)
def test_dtypes_of_arrays(array: Any, dtype: torch.dtype) -> None:
    data = read(of(array, 3))[0].micro_batches[0].data
    assert data.dtype == dtype
    assert data.tolist() == array.tolist()


def test_the_array_of_a_user_is_not_part_of_the_graph() -> None:
    assert not read(of(torch.zeros(4, requires_grad=True), 2))[0].micro_batches[0].data.requires_grad


def test_batch_size_is_32_where_nobody_says() -> None:
    assert of(torch.zeros(100, 1)).batch_size == 32
    assert of(Numbers(100)).batch_size == 32
    assert [batch.samples for batch in read(of(torch.zeros(70, 1)))] == [32, 32, 6]


def test_length_is_in_batches_and_none_where_unknown() -> None:
    assert of(torch.zeros(10), 4).length == 3
    assert of(Numbers(10), 4).length == 3
    assert of(DataLoader(Numbers(10), batch_size=4, drop_last=True)).length == 2
    assert of(DataLoader(Numbers(10), batch_sampler=BatchSampler(range(10), 4, False))).length == 3
    assert of(generator_of(10, 4)).length is None
    assert of(PerRank(generator_of(10, 4))).length is None


def test_tensor_dataset_gives_its_columns() -> None:
    batches = read(of(TensorDataset(torch.arange(5), torch.arange(5) * 10), 2))
    assert [[part.tolist() for part in batch.micro_batches[0].data] for batch in batches] == [
        [[0, 1], [0, 10]],
        [[2, 3], [20, 30]],
        [[4], [40]],
    ]


class Half(TensorDataset):
    """A TensorDataset that gives something else than its columns."""

    def __getitem__(self, index: int) -> Any:
        return tuple(part / 2 for part in super().__getitem__(index))  # type: ignore[no-untyped-call]


def test_a_subclass_of_tensor_dataset_is_asked() -> None:
    half = Half(torch.arange(3))
    for source in (of(half), of(DataLoader(half, batch_size=3))):
        assert read(source)[0].micro_batches[0].data[0].tolist() == [0.0, 0.5, 1.0]


def _doubled(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"x": torch.stack(samples) * 2}


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_keeps_its_collate_function_and_workers(workers: int) -> None:
    loader = DataLoader(Numbers(5), batch_size=2, collate_fn=_doubled, num_workers=workers)
    source = of(loader)
    for _ in range(2):
        assert order(read(source)) == [0, 2, 4, 6, 8]


class _Where(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        info = torch.utils.data.get_worker_info()
        return torch.tensor(-1 if info is None else info.num_workers)


def test_workers_do_the_fetching() -> None:
    assert order(read(of(DataLoader(_Where(), batch_size=2, num_workers=2)))) == [2, 2, 2, 2]


@pytest.mark.parametrize("dataset", [Numbers(8), TensorDataset(torch.arange(8))])
@pytest.mark.parametrize("shuffle", [False, True])
def test_drop_last_leaves_the_short_batch_out(dataset: Any, shuffle: bool) -> None:
    source = of(DataLoader(dataset, batch_size=3, drop_last=True, shuffle=shuffle))
    dropped = set()
    for epoch in range(8):
        batches = read(source, epoch=epoch)
        assert [batch.samples for batch in batches] == [3, 3]
        assert [batch.last for batch in batches] == [False, True]
        dropped |= set(range(8)) - set(order(batches))
    if shuffle:
        assert len(dropped) > 2
    else:
        assert dropped == {6, 7}


class Alternating(Sampler[int]):
    """A sampler of one's own, with an epoch to be told."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        return iter([5, 3, 1, 0, 2, 4] if self.epoch % 2 else [0, 2, 4, 5, 3, 1])


def test_samplers_are_told_the_epoch() -> None:
    whole = [0, 2, 4, 5, 3, 1]
    for loader in (
        DataLoader(Numbers(6), batch_size=4, sampler=Alternating()),
        DataLoader(Numbers(6), batch_sampler=BatchSampler(Alternating(), 4, False)),
    ):
        source = of(loader)
        assert [order(read(source, epoch=epoch)) for epoch in range(3)] == [whole, [5, 3, 1, 0, 2, 4], whole]


@pytest.mark.parametrize("as_batches", [False, True])
def test_weighted_sampler_draws_alike_on_every_rank(as_batches: bool) -> None:
    def source() -> Any:
        sampler = WeightedRandomSampler([0.0, 1.0, 1.0, 0.0, 2.0], num_samples=40)
        if as_batches:
            return of(DataLoader(Numbers(5), batch_sampler=BatchSampler(sampler, 16, False)))
        return of(DataLoader(Numbers(5), batch_size=16, sampler=sampler))

    torch.manual_seed(0)
    alone = [rows(batch) for batch in read(source(), epoch=3)]
    assert [len(step) for step in alone] == [16, 16, 8]
    assert set(flat(alone)) == {1, 2, 4}
    parts = []
    for rank in range(3):
        torch.manual_seed(rank + 1)  # as on ranks whose dropout differs
        parts.append(read(source(), epoch=3, ranks=3, rank=rank))
    assert together(parts) == alone
    assert order(read(source(), epoch=4)) != flat(alone)


def test_a_sampler_with_a_generator_of_its_own_can_be_resumed() -> None:
    sampler = WeightedRandomSampler([1.0] * 50, num_samples=50, generator=torch.Generator().manual_seed(1))
    source = of(DataLoader(Numbers(50), batch_size=10, sampler=sampler))
    whole = order(read(source, epoch=1))
    assert order(read(source, epoch=1, start=20)) == whole[20:]


class PythonShuffle(Sampler[int]):
    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        numbers = list(range(12))
        random.shuffle(numbers)
        return iter(numbers)


class NumpyShuffle(PythonShuffle):
    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(12).tolist())


@pytest.mark.parametrize("sampler", [PythonShuffle, NumpyShuffle])
@pytest.mark.parametrize("as_batches", [False, True])
def test_samplers_on_python_and_numpy_random_draw_alike_on_every_rank(
    sampler: type[PythonShuffle], as_batches: bool
) -> None:
    parts = []
    for rank in range(2):
        random.seed(rank)
        np.random.seed(rank)
        before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
        batches = (
            {"batch_sampler": BatchSampler(sampler(), 4, False)}
            if as_batches
            else {"batch_size": 4, "sampler": sampler()}
        )
        parts.append(order(read(of(DataLoader(Numbers(12), **batches)), ranks=2, rank=rank)))
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index]
    assert sorted(parts[0] + parts[1]) == list(range(12))


def test_random_sampler_of_a_few_draws_from_all() -> None:
    numbers = Numbers(10)
    source = of(DataLoader(numbers, batch_size=2, sampler=RandomSampler(numbers, num_samples=4)))
    epochs = [order(read(source, epoch=epoch)) for epoch in range(20)]
    assert all(len(set(seen)) == 4 for seen in epochs)
    assert set(flat(epochs)) == set(range(10))


def test_random_sampler_with_replacement_and_subsets() -> None:
    numbers = Numbers(10)
    sampler = RandomSampler(numbers, replacement=True, num_samples=30)
    seen = order(read(of(DataLoader(numbers, batch_size=8, sampler=sampler))))
    assert len(seen) == 30
    assert set(seen) <= set(range(10))
    subset = order(read(of(DataLoader(numbers, batch_size=2, sampler=SubsetRandomSampler([7, 1, 9])))))
    assert sorted(subset) == [1, 7, 9]


@pytest.mark.parametrize("shuffle", [False, True])
def test_distributed_sampler_stands_for_the_whole_dataset(shuffle: bool) -> None:
    parts = []
    for rank in range(2):
        numbers = Numbers(7)  # which two ranks' DistributedSamplers would pad to 8
        sampler: DistributedSampler[Any] = DistributedSampler(numbers, num_replicas=2, rank=rank, shuffle=shuffle)
        source = of(DataLoader(numbers, batch_size=4, sampler=sampler))
        assert source.length == 2
        parts.append(read(source, ranks=2, rank=rank))
    steps = together(parts)
    assert [len(step) for step in steps] == [4, 3]
    assert sorted(flat(steps)) == list(range(7))
    assert (flat(steps) == list(range(7))) is not shuffle


def test_batch_sampler_decides_the_batches() -> None:
    lists = [[4, 0, 2], [1], [3, 5]]
    source = of(DataLoader(Numbers(6), batch_sampler=lists))
    assert [rows(batch) for batch in read(source)] == lists
    assert source.batch_size is None
    assert source.length == 3
    parts = [read(source, ranks=2, rank=rank, accumulate=2) for rank in range(2)]
    assert [[rows(batch) for batch in part] for part in parts] == [[[4, 0], [1], [3]], [[2], [], [5]]]
    assert [batch.samples for batch in parts[1]] == [3, 1, 2]


class Counting(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from map(torch.tensor, range(7))


def test_iterable_dataset_is_batched() -> None:
    for source in (of(Counting(), 3), of(DataLoader(Counting(), batch_size=3))):
        assert [rows(batch) for batch in read(source)] == [[0, 1, 2], [3, 4, 5], [6]]
        assert source.length is None
        parts = [read(source, ranks=2, rank=rank) for rank in range(2)]
        assert [rows(batch) for batch in parts[1]] == [[2], [5], []]


def test_a_loader_of_ready_made_batches() -> None:
    batches = [torch.arange(3), torch.arange(3, 5), torch.arange(5, 9)]
    source = of(DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    assert [rows(batch) for batch in read(source)] == [[0, 1, 2], [3, 4], [5, 6, 7, 8]]
    assert source.length == 3


def test_a_shuffled_loader_of_ready_made_batches_is_in_one_order() -> None:
    batches = list(torch.split(torch.arange(24), 2))

    def epoch(state: int, number: int) -> list[int]:
        torch.manual_seed(state)
        loader: DataLoader[Any] = DataLoader(batches, batch_size=None, shuffle=True)  # type: ignore[arg-type]
        return order(read(of(loader), epoch=number))

    assert sorted(epoch(0, 0)) == list(range(24))
    assert epoch(1, 0) == epoch(2, 0)
    assert epoch(1, 0) != epoch(1, 1)


def test_a_generator_function_draws_alike_on_every_rank() -> None:
    def shuffled_batches() -> Iterator[torch.Tensor]:
        yield from torch.split(torch.randperm(12), 4)
        yield from torch.split(12 + torch.randperm(12), 4)

    parts = []
    for rank in range(2):
        torch.manual_seed(rank)
        parts.append(order(read(of(shuffled_batches), ranks=2, rank=rank)))
    assert sorted(parts[0] + parts[1]) == list(range(24))


def test_a_list_of_batches_is_read_as_it_is() -> None:
    batches = [(torch.arange(3), torch.zeros(3)), (torch.arange(3, 5), torch.zeros(2))]
    source = of(batches)
    for _ in range(2):
        assert [rows(batch) for batch in read(source)] == [[0, 1, 2], [3, 4]]
    assert source.length == 2


@pytest.mark.parametrize("make", [generator_of(9, 4), range(3)])
def test_iterables_are_read_anew_each_epoch(make: Any) -> None:
    class Batches:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.split(torch.arange(9), 4))

    source = of(Batches() if isinstance(make, range) else make)
    for epoch in range(2):
        assert [rows(batch) for batch in read(source, epoch=epoch)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_a_batch_without_a_sample_is_passed_over() -> None:
    batches = [torch.arange(2), torch.arange(0), torch.arange(2, 5), torch.arange(0)]
    for data in (lambda: iter(batches), PerRank(lambda: iter(batches))):
        read_batches = read(of(data))
        assert order(read_batches) == list(range(5))
        assert [batch.last for batch in read_batches] == [False] * (len(read_batches) - 1) + [True]


def test_a_source_is_taken_as_it_is() -> None:
    source = of(torch.arange(3), 2)
    assert of(source) is source
