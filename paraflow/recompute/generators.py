"""Random numbers that are not torch's: Python's and numpy's, and generators that modules own."""

from __future__ import annotations

import ctypes
import pickle
import random
from typing import Any

import numpy as np

_MERSENNE_BYTES = 4 * 624 + 4
"""What numpy's generator is made of: 624 words, and the place of the next."""


class GlobalGenerators:
    """The states of Python's and numpy's own generators, cheap enough to read before and after each block.

    Numpy takes 30 us to give its state, so that it is asked only when the memory of its generator has changed.
    """

    def __init__(self) -> None:
        self._memory = b""
        self._numpy = b""
        self._waits = True

    def read(self) -> tuple[Any, bytes]:
        """Returns the states; they are equal when nothing was drawn in between."""
        memory = _memory()
        # The second of a pair of normal numbers is given without a change of the memory.
        if self._waits or not memory or memory != self._memory:
            state: Any = np.random.get_state(legacy=False)
            self._memory, self._numpy, self._waits = memory, pickle.dumps(state), bool(state.get("has_gauss"))
        return random.getstate(), self._numpy

    def write(self, states: tuple[Any, bytes]) -> None:
        """Sets the states."""
        random.setstate(states[0])
        np.random.set_state(pickle.loads(states[1]))


GLOBAL_GENERATORS = GlobalGenerators()


def is_generator(value: Any) -> bool:
    """Whether a value is a generator of Python's or numpy's."""
    return isinstance(value, (random.Random, np.random.RandomState, np.random.Generator))


def state_of(generator: Any) -> bytes:
    """Returns the state of a generator."""
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return pickle.dumps(generator.get_state(legacy=False))
    return pickle.dumps(generator.bit_generator.state)


def set_state_of(generator: Any, state: bytes) -> None:
    """Sets the state of a generator."""
    if isinstance(generator, random.Random):
        generator.setstate(pickle.loads(state))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(pickle.loads(state))
    else:
        generator.bit_generator.state = pickle.loads(state)


def _memory() -> bytes:
    bits: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    return ctypes.string_at(bits.ctypes.state_address, _MERSENNE_BYTES) if type(bits) is np.random.MT19937 else b""
