"""How the samples of one optimizer step are divided over ranks and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


def rows_to_read(start: int, stop: int, rows: int) -> tuple[int, int]:
    """Returns what is read for a micro-batch of a batch of so many rows.

    That is the micro-batch itself; for an empty one it is a stand-in of two samples, which layers that take statistics
    over samples can run, from the end of the batch.

    Example:
        >>> rows_to_read(0, 3, rows=10), rows_to_read(5, 5, rows=5), rows_to_read(1, 1, rows=1)
        ((0, 3), (3, 5), (0, 1))
    """
    return (start, stop) if stop > start else (max(rows - 2, 0), rows)


@dataclass(frozen=True)
class Division:
    """Divides batches over data ranks and, on each, over micro-batches.

    A batch is cut into contiguous shares, as equal as can be, and each share into as many micro-batches on every rank.
    So the samples of a step do not depend on the number of ranks, and a short last batch divides like any other.

    Attributes:
        ranks: The number of data ranks.
        rank: This one.
        accumulate: Micro-batches of a full batch.

    Example:
        >>> Division(ranks=2, rank=0, accumulate=2).micro_batches(10)
        [(0, 3), (3, 5)]
        >>> Division(ranks=3, rank=2).micro_batches(2)    # nothing for this rank: an empty stand-in
        [(2, 2)]
    """

    ranks: int = 1
    rank: int = 0
    accumulate: int = 1

    def shares(self, samples: int) -> tuple[int, ...]:
        """Returns the number of samples of each rank."""
        share, rest = divmod(samples, self.ranks)
        return tuple(share + (rank < rest) for rank in range(self.ranks))

    def micro_batches(self, samples: int) -> list[tuple[int, int]]:
        """Returns this rank's micro-batches of a batch, as (start, stop) places in it.

        Every rank gets as many; where a rank has too few samples, some are empty (start equals stop).
        """
        shares = self.shares(samples)
        start = sum(shares[: self.rank])
        return [(start + a, start + b) for a, b in self.cut(shares)]

    def cut(self, shares: tuple[int, ...]) -> list[tuple[int, int]]:
        """Cuts this rank's share into micro-batches, as (start, stop) places in the share."""
        count = min(self.accumulate, max(shares))
        size, rest = divmod(shares[self.rank], count)
        stops = [size * index + min(index, rest) for index in range(count + 1)]
        return list(pairwise(stops))

    def describe(self, batch_size: int) -> str:
        """Returns the division as it is printed when a run starts.

        Example:
            >>> Division(ranks=2, accumulate=2).describe(64)
            'batch 64 = 16 a micro-batch × 2 accumulated × 2 data ranks'
            >>> Division(ranks=3).describe(32)
            'batch 32 = 11 + 11 + 10 samples on 3 data ranks'
        """
        ranks = f"{self.ranks} data rank{'s' if self.ranks > 1 else ''}"
        if batch_size % (self.ranks * self.accumulate) == 0:
            micro = batch_size // (self.ranks * self.accumulate)
            return f"batch {batch_size} = {micro} a micro-batch × {self.accumulate} accumulated × {ranks}"
        shares = " + ".join(map(str, self.shares(batch_size)))
        micro_batches = f", each in {self.accumulate} micro-batches" if self.accumulate > 1 else ""
        return f"batch {batch_size} = {shares} samples on {ranks}{micro_batches}"
