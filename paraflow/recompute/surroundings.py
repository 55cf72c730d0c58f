"""What a block sees besides its arguments, as it was when the block ran: buffers, and Python's random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

Place = tuple[dict[str, torch.Tensor | None], str]


@dataclass(frozen=True)
class Moment:
    """The surroundings as they were before a block's forward.

    Attributes:
        buffers: Copies of the buffers that forward changes, by place.
        random: The states of Python's and numpy's generators, where forward draws from them.
    """

    buffers: dict[int, torch.Tensor]
    random: tuple[Any, Any] | None


class Surroundings:
    """Notes what a block's forward changes, and lets the block run again as if nothing had changed since.

    Running statistics would otherwise be updated twice, and a block that draws a number to skip itself would draw
    another. All buffers are copied for the first forward; after it, only those that were seen to change.

    Args:
        block: The block.
    """

    def __init__(self, block: nn.Module) -> None:
        self._places: list[Place] = []
        self._owners: list[nn.Module] = []
        for owner in block.modules():
            for leaf in owner._buffers:
                self._places.append((owner._buffers, leaf))
                self._owners.append(owner)
        self._changing: set[int] | None = None
        self._draws: bool | None = None

    def now(self) -> Moment:
        """Returns the surroundings as they are."""
        watched = range(len(self._places)) if self._changing is None else self._changing
        buffers = {at: value.detach().clone() for at in watched if (value := self._value(at)) is not None}
        return Moment(buffers, _generators() if self._draws is not False else None)

    def versions(self) -> list[tuple[int, int]]:
        """Returns what tells whether a buffer was changed or replaced."""
        return [(id(value), value._version) if (value := self._value(at)) is not None else (0, 0) for at in self._all]

    def learn(self, moment: Moment, before: list[tuple[int, int]]) -> None:
        """Notes after a forward what it changed; what it did not is let go of."""
        moved = {at for at, (then, now) in enumerate(zip(before, self.versions(), strict=True)) if then != now}
        if self._changing is None:
            # Torch updates running statistics without counting it as a change.
            self._changing = {at for at in self._all if getattr(self._owners[at], "track_running_stats", False)}
        self._changing |= moved
        for at in moment.buffers.keys() - self._changing:
            del moment.buffers[at]
        if self._draws is None:
            self._draws = not _same(moment.random, _generators())

    @contextmanager
    def as_at(self, moment: Moment) -> Iterator[None]:
        """Puts the surroundings back as they were, and afterwards as they are now."""
        replaced = {at: self._value(at) for at in moment.buffers}
        drawn = None if not self._draws else _generators()
        for at, value in moment.buffers.items():
            owner, leaf = self._places[at]
            owner[leaf] = value.clone()  # a second backward runs the block once more
        if self._draws:
            _set_generators(moment.random)
        try:
            yield
        finally:
            for at, now in replaced.items():
                owner, leaf = self._places[at]
                owner[leaf] = now
            if drawn is not None:
                _set_generators(drawn)

    @property
    def _all(self) -> range:
        return range(len(self._places))

    def _value(self, at: int) -> torch.Tensor | None:
        owner, leaf = self._places[at]
        return owner[leaf]


def _generators() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _set_generators(states: tuple[Any, Any] | None) -> None:
    if states is not None:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _same(one: tuple[Any, Any] | None, other: tuple[Any, Any]) -> bool:
    if one is None or one[0] != other[0]:
        return False
    return all(np.array_equal(a, b) for a, b in zip(one[1], other[1], strict=True))
