"""The order in which samples are seen: a function of seed and epoch, and of nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_MIX = 0x9E3779B97F4A7C15  # the golden ratio in 64 bits: neighbouring (seed, epoch) pairs land far apart


def epoch_seed(seed: int, epoch: int) -> int:
    """Returns the seed of one epoch's randomness, in [0, 2^63).

    Example:
        >>> epoch_seed(0, 1) != epoch_seed(1, 0)
        True
    """
    mixed = ((seed * 2 + 1) * _MIX + (epoch + 1) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed ^= mixed >> 31
    return mixed & 0x7FFFFFFFFFFFFFFF


def shuffled(samples: int, seed: int, epoch: int) -> torch.Tensor:
    """Returns the epoch's permutation of the samples: int64, shape [samples]."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(epoch_seed(seed, epoch)))


class RandomStream:
    """Random state for reading data, apart from what training draws: torch's, Python's and numpy's generators.

    It begins at the epoch's seed. Inside ``with stream:`` the global generators go on from where the stream was, and
    outside they are as if nothing had been drawn.
    """

    def __init__(self, seed: int, epoch: int) -> None:
        self._seed = epoch_seed(seed, epoch)
        self._own: tuple[Any, Any, Any] | None = None
        self._outer: tuple[Any, Any, Any] | None = None

    def __enter__(self) -> None:
        self._outer = _random_state()
        if self._own is not None:
            _set_random_state(self._own)
            return
        seed_generators(self._seed)

    def __exit__(self, *_: object) -> None:
        assert self._outer is not None
        self._own = _random_state()
        _set_random_state(self._outer)


def seed_generators(seed: int) -> None:
    """Sets torch's CPU generator, Python's and numpy's to a seed."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Runs a block, and puts torch's CPU generator, Python's and numpy's back to where they were."""
    state = _random_state()
    try:
        yield
    finally:
        _set_random_state(state)


def _random_state() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _set_random_state(state: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


@contextmanager
def seeded(seed: int, epoch: int) -> Iterator[None]:
    """Runs a block with the global generators at the epoch's seed, and restores them after."""
    with RandomStream(seed, epoch):
        yield


def sampled(sampler: Iterable[Any], seed: int, epoch: int) -> list[Any]:
    """Returns what a user's own sampler gives in this epoch: the same on every rank, and again after a resume."""
    set_epoch(epoch, sampler, getattr(sampler, "sampler", None))
    reseed(seed, epoch, sampler, getattr(sampler, "sampler", None))
    with seeded(seed, epoch):
        return list(sampler)


def set_epoch(epoch: int, *levels: Any) -> None:
    """Tells the epoch to whatever wants to know: a dataset, a sampler, a batch sampler."""
    for level in levels:
        if hasattr(level, "set_epoch"):
            level.set_epoch(epoch)


def reseed(seed: int, epoch: int, *levels: Any) -> None:
    """Sets generators that a loader or sampler was given to the epoch's seed."""
    for level in levels:
        generator = getattr(level, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(epoch_seed(seed, epoch))
