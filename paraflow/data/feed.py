"""The feed: a source read epoch after epoch, with a position that can be saved and restored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from paraflow.data.batch import Batch
from paraflow.data.prefetch import on_device
from paraflow.data.source import Reader, Source
from paraflow.errors import DataError


def _why_nothing(epoch: int, position: int) -> str:
    if position:
        return f"The saved position, {position} samples into an epoch, lies beyond its end: resume with the same data."
    if epoch:
        return (
            "An iterator can be read only once: pass a list, an iterable that can be read again, or a function that "
            "returns a new iterator."
        )
    return "It is empty."


class Feed:
    """Reads a source for one rank.

    The position is an index: the epoch, and the samples of it that whole steps have seen over all ranks. It does not
    depend on how the samples were divided, so a run can carry on with other degrees.

    Args:
        source: Where batches come from.
        reader: This rank's part, and the seed of the order.
        device: Where the batches are to be.
        name: What the data is called in errors.

    Attributes:
        epoch: The epoch that the next batch belongs to, from 0.
        position: The samples of that epoch that are behind.
    """

    def __init__(self, source: Source, reader: Reader, device: torch.device, name: str = "data") -> None:
        self.source = source
        self.reader = reader
        self.epoch = 0
        self.position = 0
        self._device = device
        self._name = name

    def __iter__(self) -> Iterator[Batch]:
        """Yields what is left of the current epoch; with its last batch, the position moves to the next epoch.

        Raises:
            DataError: The epoch has no batch at all.
        """
        first, nothing = (self.epoch, self.position), True
        try:
            for batch in on_device(self.source.read(self.epoch, self.position, self.reader), self._device):
                # The position is that after the batch: state is saved between steps only.
                if batch.last:
                    self.epoch, self.position = self.epoch + 1, 0
                else:
                    self.position += batch.samples
                nothing = False
                yield batch
        except (RuntimeError, ConnectionError, EOFError) as error:  # the latter from the pipe of a worker that died
            if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
                raise
            raise DataError(
                f"A worker process that reads the {self._name} died, after {self.position} samples of epoch "
                f"{self.epoch + 1}: {error}. Where memory ran out, use fewer workers; num_workers=0 shows an error of "
                "the dataset itself."
            ) from error
        if nothing:
            raise DataError(f"The {self._name} gave no batch. {_why_nothing(*first)}")

    def state_dict(self) -> dict[str, Any]:
        """Returns the position."""
        return {"epoch": self.epoch, "position": self.position, "seed": self.reader.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up a position.

        Raises:
            DataError: It was saved under another seed, so its order is another one.
        """
        if state["seed"] != self.reader.seed:
            raise DataError(
                f"The saved position is in the order of seed {state['seed']}, and this run has seed "
                f"{self.reader.seed}. Write Trainer(seed={state['seed']})."
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
