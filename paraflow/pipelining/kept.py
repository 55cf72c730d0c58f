"""A value that a module keeps, as it was at a moment: to be put back, or compared with what it is later."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paraflow.pipelining.values import tensors_kept_in
from paraflow.recompute.generators import is_generator, set_state_of, state_of

MISSING: Any = object()
"""Stands for an attribute that is not there."""

_NUMBERS = (bool, int, float, complex, str, bytes, type(None), np.generic)
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
_DEEPEST = 8


class Kept:
    """A value at a moment: which object it was, and what was in it, where that can change in place.

    Args:
        value: The value: a number, a tensor, a container of those, a generator; of anything else only which it is.

    Attributes:
        value: The value, as it is now.

    Example:
        >>> seen = [1, 2]
        >>> kept = Kept(seen)
        >>> seen.append(3)
        >>> kept.differs(seen), kept.restored() is seen, seen
        (True, True, [1, 2])
    """

    __slots__ = ("_content", "_inside", "_version", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self._version = version_of(value)
        self._content = contents_of(value)
        is_container = type(value) is tuple or (self._content is not None and type(value) in _CONTAINERS)
        self._inside = [Kept(tensor) for tensor in tensors_kept_in(value)] if is_container else []

    def differs(self, now: Any) -> bool:
        """Whether a value is another than this one was."""
        if now is not self.value:
            return not is_same_number(self.value, now)
        if isinstance(now, Tensor):
            return version_of(now) != self._version
        if any(kept.differs(kept.value) for kept in self._inside):
            return True
        return self._content is not None and not _same(self._content, contents_of(now))

    def restored(self) -> Any:
        """Returns the value, with what was in it."""
        if self._content is not None:
            is_container = type(self._content) in _CONTAINERS
            # What is put back may be changed in place again, and put back again.
            fill(self.value, _copied(self._content, _DEEPEST) if is_container else self._content)
        for kept in self._inside:
            if kept.differs(kept.value):
                kept.restored()
        return self.value


def version_of(value: Any) -> int:
    """Returns how often a tensor has been written into, where torch counts it."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def is_number(value: Any) -> bool:
    """Whether a value is a number, a text, or None: something that never changes."""
    return isinstance(value, _NUMBERS)


def is_same_number(one: Any, other: Any) -> bool:
    """Whether two values are the same number or text.

    Example:
        >>> is_same_number(1000, int("1000")), is_same_number(1, True)
        (True, False)
    """
    return is_number(one) and type(one) is type(other) and bool(one == other)


def can_be_given(value: Any) -> bool:
    """Whether a value can be sent to another rank: numbers, tensors, containers of those, generators."""
    return value is MISSING or isinstance(value, (*_NUMBERS, tuple)) or contents_of(value) is not None


def contents_of(value: Any) -> Any:
    """Returns a copy of what is in a value that can change in place; None of any other, and where it is not plain."""
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, torch.Generator):
        return value.get_state()
    if is_generator(value):
        return state_of(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.copy()
    return _copied(value, _DEEPEST) if type(value) in _CONTAINERS else None


def fill(value: Any, content: Any) -> None:
    """Puts into a value what `contents_of` gave of it, or of one like it."""
    if isinstance(value, Tensor):
        with torch.no_grad():
            value.copy_(content)
    elif isinstance(value, torch.Generator):
        value.set_state(content)
    elif is_generator(value):
        set_state_of(value, content)
    elif isinstance(value, np.ndarray):
        value[...] = content
    else:
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(content)


def _tensor(tensor: Tensor) -> Tensor | None:
    """A copy; None of what has no values, or may not be written into."""
    writable = torch.is_inference_mode_enabled() or not tensor.is_inference()
    return tensor.detach().clone() if type(tensor) is Tensor and not tensor.is_meta and writable else None


def _copied(value: Any, depth: int) -> Any:
    if isinstance(value, (*_NUMBERS, Tensor)):
        return value
    if depth == 0 or (type(value) is not tuple and type(value) not in _CONTAINERS):
        return None
    children = list(value.values()) if isinstance(value, dict) else list(value)
    copies = [_copied(child, depth - 1) for child in children]
    if any(new is None and old is not None for new, old in zip(copies, children, strict=True)):
        return None
    if isinstance(value, tuple):
        return tuple(copies)
    made = copy.copy(value)
    fill(made, dict(zip(value, copies, strict=True)) if isinstance(value, dict) else copies)
    return made


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and _same(list(one.values()), list(other.values()))
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Tensor):
        return torch.equal(one, other) if type(one) is Tensor else False
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)
