"""The same few batches, epoch after epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paraflow.data.batch import Batch
from paraflow.data.source import Reader, Source
from paraflow.errors import DataError


class PinnedSource:
    """The first batches of a source's first epoch, the same in each epoch: in content, in order, in augmentation.

    Args:
        source: The source.
        batches: How many.

    Raises:
        DataError: Fewer than one are asked for.
    """

    def __init__(self, source: Source, batches: int) -> None:
        if isinstance(batches, bool) or not isinstance(batches, int) or batches < 1:
            raise DataError(f"overfit must be a whole number of batches of at least 1, not {batches!r}.")
        self._source = source
        self._batches = batches

    @property
    def batch_size(self) -> int | None:
        """Samples of a full batch over all ranks, as the source has it."""
        return self._source.batch_size

    @property
    def length(self) -> int | None:
        """Batches of an epoch; None where the source does not know and may have fewer."""
        length = self._source.length
        return None if length is None else min(length, self._batches)

    def read(self, epoch: int, start: int, reader: Reader) -> Iterator[Batch]:
        """Yields this rank's part of the batches, from the sample ``start`` on."""
        seen = 0
        for number, batch in enumerate(self._source.read(0, 0, reader), 1):
            batch.last = batch.last or number == self._batches
            if seen >= start:
                yield batch
            if batch.last:
                return
            seen += batch.samples

    def __getattr__(self, name: str) -> Any:
        """Whatever else the source offers, such as a sample or a signature."""
        return getattr(self._source, name)
