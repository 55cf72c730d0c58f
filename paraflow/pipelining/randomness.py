"""Random numbers of a pipeline's micro-batches: the same under every schedule, and where stages must agree, on all.

What a step draws outside of units (the masks of a masked language model, say) every stage draws for itself, and all
must draw the same, with whatever generator: torch's, numpy's or Python's. What units draw, and functions of what units
give, is their stage's own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from paraflow.data.order import epoch_seed, seed_generators


class Randomness:
    """The random numbers of one step, which follow from the state that the generators have when it begins.

    The generators are afterwards as if one number had been drawn.

    Args:
        device: The device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._seed = int(torch.randint(2**62, (), device="cpu"))
        self._device = device
        self._common = self._own = _Stream(self._seed, device)

    @contextmanager
    def step(self, place: int) -> Iterator[None]:
        """Runs a rank's part of a step: what backwards draw, each rank a different number of times, is its own.

        Args:
            place: The place of the rank along ``pp``.
        """
        stream = _Stream(epoch_seed(self._seed, -2 - place), self._device)
        stream.begin()
        try:
            yield
        finally:
            stream.end()

    @contextmanager
    def micro_batch(self, stage: int, index: int) -> Iterator[None]:
        """Runs a stage on a micro-batch: what is drawn inside all stages draw alike, whatever has run before."""
        seed = epoch_seed(self._seed, index)
        before = self._common, self._own
        self._common, self._own = _Stream(seed, self._device), _Stream(epoch_seed(seed, stage), self._device)
        self._common.begin()
        try:
            yield
        finally:
            self._common.end()
            self._common, self._own = before

    @contextmanager
    def own_part(self) -> Iterator[None]:
        """Runs what only this stage runs, within a micro-batch: what is drawn inside is the stage's own."""
        own = self._own
        own.begin()
        try:
            yield
        finally:
            own.end()


class _Stream:
    """Random numbers beside those of the generators, which go on where they were when it is begun again."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device if device.type == "cuda" else None
        self._here: tuple[Any, ...] | None = None
        self._outside: tuple[Any, ...] | None = None

    def begin(self) -> None:
        """Has the generators give the stream's numbers."""
        self._outside = self._read()
        if self._here is not None:
            self._write(self._here)
            return
        seed_generators(self._seed)
        if self._device is not None:
            torch.cuda.default_generators[self._device.index].manual_seed(self._seed)

    def end(self) -> None:
        """Has the generators go on where they were."""
        assert self._outside is not None
        self._here = self._read()
        self._write(self._outside)

    def _read(self) -> tuple[Any, ...]:
        on_device = None if self._device is None else torch.cuda.get_rng_state(self._device)
        return torch.get_rng_state(), random.getstate(), np.random.get_state(), on_device

    def _write(self, state: tuple[Any, ...]) -> None:
        torch.set_rng_state(state[0])
        random.setstate(state[1])
        np.random.set_state(state[2])
        if self._device is not None:
            torch.cuda.set_rng_state(state[3], self._device)
