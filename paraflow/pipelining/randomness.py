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

from paraflow.data.order import epoch_seed


class Randomness:
    """The random numbers of one step, which follow from the state that the generators have when it begins.

    The generators are afterwards as if one number had been drawn.

    Args:
        device: The device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._seed = int(torch.randint(2**62, (), device="cpu"))
        self._device = device
        self._own = _Stream(self._seed, device)

    @contextmanager
    def step(self, place: int) -> Iterator[None]:
        """Runs a rank's part of a step: what backwards draw, each rank a different number of times, is its own.

        Args:
            place: The place of the rank along ``pp``.
        """
        with _Stream(epoch_seed(self._seed, -2 - place), self._device).drawn(everything=True):
            yield

    @contextmanager
    def micro_batch(self, stage: int, index: int) -> Iterator[None]:
        """Runs a stage on a micro-batch: what is drawn inside all stages draw alike, whatever has run before."""
        seed = epoch_seed(self._seed, index)
        before, self._own = self._own, _Stream(epoch_seed(seed, stage), self._device)
        try:
            with _Stream(seed, self._device).drawn(everything=True):
                yield
        finally:
            self._own = before

    @contextmanager
    def own_part(self, *, everything: bool) -> Iterator[None]:
        """Runs what only this stage runs, within a micro-batch: what is drawn inside is the stage's own.

        Args:
            everything: Whether numpy's and Python's generators are drawn from as well; to set those takes time.
        """
        with self._own.drawn(everything=everything):
            yield


class _Stream:
    """Random numbers beside those of the generators, which go on where they were when it is begun again."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._torch = _OfTorch(device)
        self._here: tuple[Any, ...] | None = None
        self._others_here: tuple[Any, ...] | None = None

    @contextmanager
    def drawn(self, *, everything: bool) -> Iterator[None]:
        """Has torch's generators, or all, give the stream's numbers inside."""
        outside = self._torch.read()
        others = _read_others() if everything else None
        if self._here is None:
            self._torch.seed(self._seed)
        else:
            self._torch.write(self._here)
        if everything:
            _seed_others(self._seed) if self._others_here is None else _write_others(self._others_here)
        try:
            yield
        finally:
            self._here = self._torch.read()
            self._torch.write(outside)
            if others is not None:
                self._others_here = _read_others()
                _write_others(others)


class _OfTorch:
    """torch's generators: the host's and the device's."""

    def __init__(self, device: torch.device) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index])

    def seed(self, seed: int) -> None:
        for generator in self._generators:
            generator.manual_seed(seed)

    def read(self) -> tuple[torch.Tensor, ...]:
        return tuple(generator.get_state() for generator in self._generators)

    def write(self, states: tuple[torch.Tensor, ...]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def _seed_others(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _read_others() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()


def _write_others(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
