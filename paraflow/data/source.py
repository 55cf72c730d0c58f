"""Sources: where batches come from. A source divides each batch, and reads no sample that another rank runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from paraflow.data.agreement import fingerprint
from paraflow.data.batch import Batch, MicroBatch, count_rows, map_tensors, take_rows
from paraflow.data.division import Division, rows_to_read
from paraflow.data.order import epoch_seed, sampled, shuffled
from paraflow.data.seeded import SeededDataset

Order = Callable[[int, int], Any]
"""From (seed, epoch) to the order of the samples: an int64 tensor, a list of indices, or None for as they lie."""


def _alone(count: int) -> list[int]:
    return [count]


@dataclass(frozen=True)
class Reader:
    """Who reads: this rank's part of each batch, and what its order depends on.

    Attributes:
        division: How batches are divided over ranks and micro-batches.
        seed: The seed of the order.
        gather: Gives every data rank's number, from this rank's; a collective.
    """

    division: Division = field(default_factory=Division)
    seed: int = 0
    gather: Callable[[int], list[int]] = _alone


class Source(Protocol):
    """What can be read batch by batch, epoch by epoch.

    Attributes:
        batch_size: Samples of a full batch over all ranks; None where batches come ready-made.
        length: Batches of an epoch; None where it is not known.
    """

    @property
    def batch_size(self) -> int | None: ...  # noqa: D102

    @property
    def length(self) -> int | None: ...  # noqa: D102

    def read(self, epoch: int, start: int, reader: Reader) -> Iterator[Batch]:
        """Yields this rank's part of the epoch's batches, from the sample ``start`` on."""
        ...


@dataclass(frozen=True)
class Chunks:
    """An indexable source's samples, cut into batches.

    Attributes:
        samples: How many samples an epoch has.
        batch_size: How many of them a batch has.
        drop_last: Whether a short last batch is left out.
    """

    samples: int
    batch_size: int
    drop_last: bool = False

    @property
    def length(self) -> int:
        """The number of batches of an epoch."""
        return self.end // self.batch_size + (self.end % self.batch_size > 0)

    @property
    def end(self) -> int:
        """The number of samples that an epoch sees."""
        return self.samples - self.samples % self.batch_size if self.drop_last else self.samples

    def bounds(self, start: int) -> Iterator[tuple[int, int]]:
        """Yields the (start, size) of each batch."""
        for first in range(start, self.end, self.batch_size):
            yield first, min(self.batch_size, self.end - first)


class _Chunked:
    """A source whose samples can be counted and indexed."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks

    @property
    def batch_size(self) -> int | None:
        """Samples of a full batch over all ranks."""
        return self._chunks.batch_size

    @property
    def length(self) -> int | None:
        """Batches of an epoch."""
        return self._chunks.length

    def signature(self) -> int:
        """Returns a number that is the same on ranks with the same data, as far as it is known without reading it."""
        return self._chunks.samples


class ArraySource(_Chunked):
    """Tensors whose first dimension is the sample, cut by one indexing operation a batch.

    Args:
        data: A batch-like tree whose tensors all have as many rows.
        batch_size: Samples of a batch over all ranks.
        shuffle: Whether each epoch has an order of its own.
        drop_last: Whether a short last batch is left out.
    """

    def __init__(self, data: Any, batch_size: int, *, shuffle: bool, drop_last: bool = False) -> None:
        super().__init__(Chunks(count_rows(data), batch_size, drop_last))
        self._data = data
        self._shuffle = shuffle

    def read(self, epoch: int, start: int, reader: Reader) -> Iterator[Batch]:
        """Yields this rank's part of the epoch's batches, from the sample ``start`` on."""
        fetch = self._fetcher(shuffled(self._chunks.samples, reader.seed, epoch) if self._shuffle else None)
        division, end = reader.division, self._chunks.end
        size = 0
        pieces: list[tuple[int, int, int]] = []
        shares: tuple[int, ...] = ()
        for first in range(start, end, self._chunks.batch_size):
            rows = min(self._chunks.batch_size, end - first)
            if rows != size:
                size, shares = rows, division.shares(rows)
                pieces = [(*rows_to_read(a, b, rows), b - a) for a, b in division.micro_batches(rows)]
            micro_batches = [MicroBatch(fetch(first + start, first + stop), samples) for start, stop, samples in pieces]
            yield Batch(micro_batches, rows, shares, first + rows >= end)

    def signature(self) -> int:
        """Returns a number that is the same on ranks with the same data."""
        return fingerprint(self._data)

    def sample(self, rows: int) -> Any:
        """Returns a batch of the first samples, for measuring."""
        return take_rows(self._data, 0, min(rows, self._chunks.samples), self._chunks.samples)

    def _fetcher(self, order: torch.Tensor | None) -> Callable[[int, int], Any]:
        data, rows = self._data, self._chunks.samples
        if order is None:
            return lambda start, stop: take_rows(data, start, stop, rows)
        if type(data) is tuple and all(isinstance(part, torch.Tensor) and part.is_cpu for part in data):
            return lambda start, stop: _select_columns(data, order.narrow(0, start, stop - start))
        return lambda start, stop: _select(data, order[start:stop])


def _select_columns(columns: tuple[torch.Tensor, ...], index: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple([column.index_select(0, index) for column in columns])


def _select(data: Any, index: torch.Tensor) -> Any:
    return map_tensors(lambda part: part.index_select(0, index.to(part.device)), data)


class DatasetSource(_Chunked):
    """A map-style dataset, read by torch's DataLoader: each micro-batch is fetched and collated by itself.

    Args:
        dataset: What has ``__len__`` and ``__getitem__``.
        chunks: How its samples are cut into batches.
        order: From (seed, epoch) to the order of the samples.
        options: Further arguments for the DataLoader: workers, collate_fn and so on.
    """

    def __init__(self, dataset: Any, chunks: Chunks, order: Order, options: dict[str, Any]) -> None:
        super().__init__(chunks)
        self._order = order
        self._indices = _IndexLists()
        self._generator = torch.Generator()
        self._loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            SeededDataset(dataset), batch_sampler=self._indices, generator=self._generator, **options
        )

    def read(self, epoch: int, start: int, reader: Reader) -> Iterator[Batch]:
        """Yields this rank's part of the epoch's batches, from the sample ``start`` on."""
        order = self._order(reader.seed, epoch)
        bounds = list(self._chunks.bounds(start))
        self._indices.begin(_index_lists(order, bounds, reader.division), epoch_seed(reader.seed, epoch))
        self._generator.manual_seed(epoch_seed(reader.seed, epoch))
        fetched = iter(self._loader)
        for first, rows in bounds:
            pieces = reader.division.micro_batches(rows)
            micro_batches = [MicroBatch(next(fetched), b - a) for a, b in pieces]
            yield Batch(micro_batches, rows, reader.division.shares(rows), first + rows >= self._chunks.end)

    def sample(self, rows: int) -> Any:
        """Returns a batch of the first samples, for measuring."""
        dataset: Any = self._loader.dataset
        collate: Callable[[list[Any]], Any] = self._loader.collate_fn
        return collate([dataset[0, index] for index in range(min(rows, len(dataset)))])


class _IndexLists:
    """A batch sampler whose lists are set anew for each epoch, so that one loader keeps its workers.

    It yields pairs (seed of the epoch, index), as `SeededDataset` takes them.
    """

    def __init__(self) -> None:
        self._lists: Iterable[list[int]] = ()
        self._seed = 0

    def begin(self, lists: Iterable[list[int]], seed: int) -> None:
        """Sets an epoch's lists of indices, and its seed."""
        self._lists, self._seed = lists, seed

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return ([(self._seed, index) for index in indices] for indices in self._lists)


def _index_lists(order: Any, bounds: list[tuple[int, int]], division: Division) -> Iterator[list[int]]:
    for first, rows in bounds:
        for a, b in division.micro_batches(rows):
            start, stop = (first + place for place in rows_to_read(a, b, rows))
            if order is None:
                yield list(range(start, stop))
            else:
                piece = order[start:stop]
                yield piece.tolist() if isinstance(piece, torch.Tensor) else list(piece)


class IndexBatchSource:
    """A map-style dataset under a user's own batch sampler: each of its lists is one batch over all ranks."""

    def __init__(self, dataset: Any, batch_sampler: Any, options: dict[str, Any]) -> None:
        self._batch_sampler = batch_sampler
        self._indices = _IndexLists()
        self._generator = torch.Generator()
        self._loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            SeededDataset(dataset), batch_sampler=self._indices, generator=self._generator, **options
        )

    @property
    def batch_size(self) -> int | None:
        """None: the sampler decides."""
        return None

    @property
    def length(self) -> int | None:
        """Batches of an epoch, where the sampler knows."""
        return len(self._batch_sampler) if hasattr(self._batch_sampler, "__len__") else None

    def read(self, epoch: int, start: int, reader: Reader) -> Iterator[Batch]:
        """Yields this rank's part of the epoch's batches, from the sample ``start`` on."""
        lists = _after([list(indices) for indices in sampled(self._batch_sampler, reader.seed, epoch)], start)
        self._generator.manual_seed(epoch_seed(reader.seed, epoch))
        mine = [_pad(indices, piece) for indices in lists for piece in reader.division.micro_batches(len(indices))]
        self._indices.begin(mine, epoch_seed(reader.seed, epoch))
        fetched = iter(self._loader)
        for number, indices in enumerate(lists, 1):
            pieces = reader.division.micro_batches(len(indices))
            micro_batches = [MicroBatch(next(fetched), b - a) for a, b in pieces]
            yield Batch(micro_batches, len(indices), reader.division.shares(len(indices)), number == len(lists))


def _after(lists: list[list[int]], start: int) -> list[list[int]]:
    """The lists that begin at or after a number of samples."""
    starts = itertools.accumulate((len(indices) for indices in lists), initial=0)
    return [indices for indices, first in zip(lists, starts, strict=False) if first >= start and indices]


def _pad(indices: list[int], piece: tuple[int, int]) -> list[int]:
    return indices[slice(*rows_to_read(*piece, len(indices)))]


def _draws_all(sampler: Any) -> bool:
    """Whether a random sampler draws each sample of its source once."""
    return bool(sampler.num_samples == len(sampler.data_source))


def sampler_order(sampler: Any, samples: int) -> Order:
    """Returns the order that a DataLoader's sampler stands for: ours for torch's plain samplers, else its own."""
    from torch.utils.data import RandomSampler, SequentialSampler
    from torch.utils.data.distributed import DistributedSampler

    if type(sampler) is SequentialSampler or (type(sampler) is DistributedSampler and not sampler.shuffle):
        return lambda seed, epoch: None
    plain_random = type(sampler) is RandomSampler and not sampler.replacement and _draws_all(sampler)
    if plain_random or type(sampler) is DistributedSampler:
        return lambda seed, epoch: shuffled(samples, seed, epoch)
    return lambda seed, epoch: sampled(sampler, seed, epoch)
