"""What a block sees besides its arguments, as it was when the block ran: buffers, attributes, and random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import nn

from paraflow.errors import ModelError
from paraflow.recompute.generators import GLOBAL_GENERATORS, is_generator, set_state_of, state_of

Place = tuple[int, str]
"""Which module's buffers or attributes, and the name there."""

_ALWAYS_COPIED = 2**20
"""Up to so many bytes a tensor is copied before every forward: it might be written for the first time."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_NOT_THERE = object()


@dataclass
class _Seen:
    """A buffer, or a tensor that is an attribute, before a forward."""

    tensor: torch.Tensor
    version: int
    copy: torch.Tensor | None


@dataclass
class Moment:
    """The surroundings as they were before one forward of a block.

    Attributes:
        tensors: Buffers, and tensors that are attributes.
        names: The names of each space and what they meant; let go of when forward is over.
        owned: The states of the generators that modules own.
        drawn: The states of Python's and numpy's generators, where forward drew from them.
        rebound: The names to which forward gave another meaning, and what they meant before.
    """

    tensors: dict[Place, _Seen]
    names: list[tuple[list[str], list[Any]]]
    owned: list[tuple[Any, bytes]]
    drawn: tuple[Any, bytes] | None
    rebound: list[tuple[Place, Any]] = field(default_factory=list)


class Surroundings:
    """Lets a block run again as if nothing had changed since.

    Running statistics would otherwise be updated twice, a counter would count twice, and a block that draws a number to
    skip itself would draw another. That is looked for at every forward, since it may begin at any step. What is
    replaced is held; what is written in place is copied before, if it is small or was seen to be written. What changes
    inside a list or an object of the user's is not seen.

    Args:
        name: The block's name in the model.
        block: The block.
    """

    def __init__(self, name: str, block: nn.Module) -> None:
        self._name = name
        self._spaces: list[dict[str, Any]] = []
        self._written: set[Place] = set()
        for owner in block.modules():
            self._spaces += [vars(owner), owner._buffers]
            # Torch updates running statistics without counting it as a change.
            counted = not getattr(owner, "track_running_stats", False)
            at = len(self._spaces) - 1
            self._written |= {(at, leaf) for leaf in owner._buffers if not counted or leaf.startswith("running_")}
        self._known: list[tuple[int, list[str]]] = [(-1, [])] * len(self._spaces)
        self._copies_all = True

    def now(self) -> Moment:
        """Returns the surroundings as they are."""
        tensors: dict[Place, _Seen] = {}
        owned: list[tuple[Any, bytes]] = []
        names = [
            (leaves, [space.get(leaf) for leaf in leaves])
            for space, leaves in zip(self._spaces, self._leaves(), strict=True)
        ]
        for at, (leaves, values) in enumerate(names):
            for leaf, value in zip(leaves, values, strict=True):
                if isinstance(value, torch.Tensor):
                    if not value.requires_grad:
                        tensors[at, leaf] = self._seen((at, leaf), value)
                elif is_generator(value):
                    owned.append((value, state_of(value)))
        return Moment(tensors, names, owned, GLOBAL_GENERATORS.read())

    def _leaves(self) -> list[list[str]]:
        """The names in each space but for those of torch, which are sorted out when one comes or goes."""
        for at, space in enumerate(self._spaces):
            count, leaves = self._known[at]
            if count != len(space) or not all(leaf in space for leaf in leaves):
                self._known[at] = (len(space), [leaf for leaf in space if leaf not in _OF_EVERY_MODULE])
        return [leaves for _, leaves in self._known]

    def learn(self, moment: Moment) -> None:
        """Notes after a forward what it changed; what it did not is let go of."""
        self._copies_all = False
        for at, ((before, then), after, space) in enumerate(
            zip(moment.names, self._leaves(), self._spaces, strict=True)
        ):
            now = [space.get(leaf) for leaf in after]
            if before is after and all(map(is_, then, now)):
                continue
            was = dict(zip(before, then, strict=True))
            for leaf in {*before, *after}:
                if was.get(leaf, _NOT_THERE) is not space.get(leaf, _NOT_THERE):
                    moment.rebound.append(((at, leaf), was.get(leaf, _NOT_THERE)))
        moment.names = []
        for place, seen in moment.tensors.items():
            if seen.copy is None or place in self._written:
                continue
            if _version(seen.tensor) == seen.version:
                seen.copy = None
            else:
                self._written.add(place)
        if moment.drawn == GLOBAL_GENERATORS.read():
            moment.drawn = None

    @contextmanager
    def as_at(self, moment: Moment) -> Iterator[None]:
        """Puts the surroundings back as they were, and afterwards as they are now.

        Raises:
            ModelError: A tensor was written in place of which there is no copy.
        """
        now = [(place, self._value(place)) for place, _ in moment.rebound]
        now += [(place, self._value(place)) for place in moment.tensors]
        drawn = None if moment.drawn is None else GLOBAL_GENERATORS.read()
        owned = [(generator, state_of(generator)) for generator, _ in moment.owned]
        for place, value in moment.rebound:
            self._set(place, value)
        for place, seen in moment.tensors.items():
            self._set(place, self._as_it_was(place, seen))
        _write(moment.owned, moment.drawn)
        try:
            yield
        finally:
            for place, value in now:
                self._set(place, value)
            _write(owned, drawn)

    def _as_it_was(self, place: Place, seen: _Seen) -> torch.Tensor:
        if seen.copy is not None:
            return seen.copy.clone()  # a second backward runs the block once more
        if _version(seen.tensor) == seen.version:
            return seen.tensor
        self._written.add(place)
        raise ModelError(
            f"The block {self._name!r} has a tensor {place[1]!r} of {seen.tensor.nbytes:,} bytes that was written in "
            "place since the block ran, but not in its first forward, so that there is no copy to run it again with. "
            f"Write self.{place[1]} = ... with a new tensor instead, or leave this block out: "
            "activation_checkpointing takes a list of patterns of module names."
        )

    def _seen(self, place: Place, tensor: torch.Tensor) -> _Seen:
        copied = self._copies_all or place in self._written or tensor.numel() * tensor.element_size() <= _ALWAYS_COPIED
        return _Seen(tensor, _version(tensor), tensor.detach().clone() if copied else None)

    def _value(self, place: Place) -> Any:
        return self._spaces[place[0]].get(place[1], _NOT_THERE)

    def _set(self, place: Place, value: Any) -> None:
        if value is _NOT_THERE:
            self._spaces[place[0]].pop(place[1], None)
        else:
            self._spaces[place[0]][place[1]] = value


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _write(owned: list[tuple[Any, bytes]], drawn: tuple[Any, bytes] | None) -> None:
    for generator, state in owned:
        set_state_of(generator, state)
    if drawn is not None:
        GLOBAL_GENERATORS.write(drawn)
