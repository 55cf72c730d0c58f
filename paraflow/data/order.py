"""The order in which samples are seen: a function of seed and epoch, and of nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

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


@contextmanager
def seeded(seed: int, epoch: int) -> Iterator[None]:
    """Runs a block with torch's CPU generator at the epoch's seed, and restores it after."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(epoch_seed(seed, epoch))
    try:
        yield
    finally:
        torch.set_rng_state(state)


def sampled(sampler: Iterable[int], seed: int, epoch: int) -> list[int]:
    """Returns the order a user's own sampler gives in this epoch: the same on every rank."""
    set_epoch(epoch, sampler)
    with seeded(seed, epoch):
        return [int(index) for index in sampler]


def set_epoch(epoch: int, *levels: Any) -> None:
    """Tells the epoch to whatever wants to know: a dataset, a sampler, a batch sampler."""
    for level in levels:
        if hasattr(level, "set_epoch"):
            level.set_epoch(epoch)
