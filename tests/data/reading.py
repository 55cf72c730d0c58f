"""Reads sources as ranks would, without processes: a rank is a reader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from paraflow.data import Batch, Division, Reader, Source, as_source


class Numbers(Dataset[torch.Tensor]):
    """The samples 0 to n - 1, and which of them were fetched."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        self.fetched.append(index)
        return torch.tensor(index)


def generator_of(samples: int, batch_size: int) -> Callable[[], Iterator[torch.Tensor]]:
    return lambda: iter(torch.split(torch.arange(samples), batch_size))


def _own_batches(samples: int, batch_size: int) -> DataLoader[Any]:
    numbers = Numbers(samples)
    return DataLoader(numbers, batch_sampler=BatchSampler(SequentialSampler(numbers), batch_size, False))


def of(data: Any, batch_size: int | None = None, shuffle: bool = False) -> Source:
    return as_source(data, batch_size=batch_size, shuffle=shuffle)


SOURCES: dict[str, Callable[[int, int], Source]] = {
    "array": lambda n, b: of(torch.arange(n), b),
    "array shuffled": lambda n, b: of((torch.arange(n), torch.zeros(n, 2)), b, shuffle=True),
    "tree shuffled": lambda n, b: of({"x": torch.arange(n), "more": (torch.zeros(n),)}, b, shuffle=True),
    "dataset": lambda n, b: of(Numbers(n), b),
    "dataset shuffled": lambda n, b: of(Numbers(n), b, shuffle=True),
    "loader": lambda n, b: of(DataLoader(Numbers(n), batch_size=b)),
    "loader shuffled": lambda n, b: of(DataLoader(Numbers(n), batch_size=b, shuffle=True)),
    "batch sampler": lambda n, b: of(_own_batches(n, b)),
    "stream": lambda n, b: of(generator_of(n, b)),
}
"""From (samples, batch size) to a source of the samples 0 to n - 1, one for each way of reading."""


def read(
    source: Source, *, epoch: int = 0, start: int = 0, ranks: int = 1, rank: int = 0, accumulate: int = 1, seed: int = 0
) -> list[Batch]:
    return list(source.read(epoch, start, Reader(Division(ranks, rank, accumulate), seed)))


def first_tensor(data: Any) -> torch.Tensor:
    if isinstance(data, torch.Tensor):
        return data
    return first_tensor(next(iter(data.values())) if isinstance(data, dict) else data[0])


def rows(batch: Batch) -> list[int]:
    """The samples of a rank's batch, without stand-ins."""
    return [n for micro in batch.micro_batches if micro.samples for n in first_tensor(micro.data).tolist()]


def order(batches: Iterable[Batch]) -> list[int]:
    return flat(rows(batch) for batch in batches)


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def together(parts: Sequence[Iterable[Batch]]) -> list[list[int]]:
    """The samples of each step, over all ranks."""
    return [order(step) for step in zip(*parts, strict=True)]
