"""Sources that can only be read from the front: iterables of batches, and streams that differ by rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from paraflow.data.agreement import fingerprint
from paraflow.data.batch import Batch, MicroBatch, count_rows, take_rows, tensors_of_arrays, warn_if_ragged
from paraflow.data.division import rows_to_read
from paraflow.data.order import RandomStream, reseed, set_epoch
from paraflow.data.source import Reader
from paraflow.errors import DataError

_END = object()

Batches = Iterable[Any] | Callable[[], Iterable[Any]]


@dataclass(frozen=True)
class PerRank:
    """Marks data that each rank reads for itself: its batches are this rank's part, and a step sees them all together.

    For streams that are split over ranks already (by file, by host). Ranks may have different numbers of batches, and
    batches of different sizes: who has run out takes part in the steps of the others with nothing.

    Attributes:
        batches: An iterable of this rank's batches, or a function that returns one.
    """

    batches: Batches


class StreamSource:
    """An iterable of batches, the same on every rank: each is the batch of one step, and a rank keeps its share.

    Args:
        batches: The iterable, or a function that returns one for each epoch.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    @property
    def batch_size(self) -> int | None:
        """None: batches come ready-made."""
        return None

    @property
    def length(self) -> int | None:
        """Batches of an epoch, where the iterable knows."""
        try:
            return len(self._batches)  # type: ignore[arg-type]
        except TypeError:
            return None

    def read(self, epoch: int, start: int, reader: Reader) -> Iterator[Batch]:
        """Yields this rank's part of the epoch's batches; what lies before the sample ``start`` is read past."""
        return mark_last(self._divided(epoch, start, reader))

    def _divided(self, epoch: int, start: int, reader: Reader) -> Iterator[Batch]:
        seen = 0
        for whole, rows in self._checked(_iterate(self._batches, reader.seed, epoch), reader):
            if seen >= start:
                pieces = reader.division.micro_batches(rows)
                yield Batch(cut_rows(whole, rows, pieces), rows, reader.division.shares(rows))
            seen += rows

    def _checked(self, batches: Iterator[tuple[Any, int]], reader: Reader) -> Iterator[tuple[Any, int]]:
        """Compares the ranks' batches: the first one's samples, and every one's number of them."""
        first = True
        while True:
            current = next(batches, None)
            mine = 0 if current is None else current[1]
            signature = fingerprint(current[0]) if first and current is not None else mine
            if reader.division.ranks > 1 and len(set(reader.gather(signature))) > 1:
                raise DataError(
                    f"The ranks read different batches: data rank {reader.division.rank} has {mine} samples in this "
                    "one. An iterable must give every rank the same batches, of which each takes its share; mark "
                    "streams that are split over ranks already with pf.data.PerRank(...)."
                )
            if current is None:
                return
            first = False
            yield current


class PerRankSource:
    """This rank's own stream: its batches and those of the other ranks are one step's batch."""

    def __init__(self, data: PerRank) -> None:
        self._batches = data.batches

    @property
    def batch_size(self) -> int | None:
        """None: batches come ready-made."""
        return None

    @property
    def length(self) -> int | None:
        """None: the other ranks' numbers are not known before they are read."""
        return None

    def read(self, epoch: int, start: int, reader: Reader) -> Iterator[Batch]:
        """Yields this rank's part of each step until no rank has anything left."""
        return mark_last(self._together(epoch, start, reader))

    def _together(self, epoch: int, start: int, reader: Reader) -> Iterator[Batch]:
        batches = _iterate(self._batches, reader.seed, epoch)
        division, seen, rows = reader.division, 0, 0
        current: Any = None
        while True:
            mine = next(batches, None)
            shares = tuple(reader.gather(0 if mine is None else mine[1]))
            if not any(shares):
                return
            current, rows = (current, rows) if mine is None else mine
            if current is None:
                raise DataError(f"Data rank {division.rank} has no batch at all; give every rank at least one.")
            if seen >= start:
                yield Batch(cut_rows(current, rows, division.cut(shares)), sum(shares), shares)
            seen += sum(shares)


def cut_rows(whole: Any, rows: int, pieces: list[tuple[int, int]]) -> list[MicroBatch]:
    """Cuts micro-batches out of a batch; an empty piece becomes a stand-in that counts nothing."""
    return [
        MicroBatch(take_rows(whole, *rows_to_read(start, stop, rows), rows), stop - start) for start, stop in pieces
    ]


def mark_last(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Reads one batch ahead, to mark the epoch's last."""
    current = next(batches, None)
    while current is not None:
        following = next(batches, None)
        current.last = following is None
        yield current
        current = following


def _iterate(batches: Batches, seed: int, epoch: int) -> Iterator[tuple[Any, int]]:
    """Yields the batches that have rows, with their number; what reading draws is apart from what training draws."""
    levels = (batches, getattr(batches, "dataset", None), getattr(batches, "sampler", None))
    set_epoch(epoch, *levels)
    reseed(seed, epoch, *levels)
    stream = RandomStream(seed, epoch)
    with stream:
        iterator = iter(batches() if callable(batches) else batches)
    looked = epoch > 0  # nobody needs to be told twice
    while True:
        with stream:
            batch = next(iterator, _END)
        if batch is _END:
            return
        batch = tensors_of_arrays(batch)
        rows = count_rows(batch)
        if rows and not looked:
            looked = True
            warn_if_ragged(batch)
        if rows:
            yield batch, rows
