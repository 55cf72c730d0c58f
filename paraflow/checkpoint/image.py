"""A state taken apart for the disk: its tensors by path, and plain data with a mark where each tensor belongs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from paraflow.checkpoint.stored import Stored
from paraflow.errors import CheckpointError
from paraflow.parts import Box, Elsewhere, boxes_of, holders_of, is_spread, local, writes

TENSOR, TUPLE, NUMBERED = "__tensor__", "__tuple__", "__numbered__"
"""What plain data has in the place of a tensor, of a tuple, and of a dict whose keys are numbers."""
_PIECE = "#"


@dataclass(frozen=True)
class Place:
    """Where in a tensor that is spread over ranks a piece lies that this rank has of it.

    Attributes:
        path: The tensor's path in the state.
        shape: The shape of the whole.
        dtype: Its dtype.
        offset: Where the piece begins, along each dimension.
        writes: Whether this rank is the first of those in the tensor's layout that hold the same part.
        holders: The ranks in the tensor's layout.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: tuple[int, ...]
    writes: bool
    holders: tuple[int, ...]


@dataclass(frozen=True)
class Image:
    """A state, taken apart.

    Attributes:
        plain: Everything but the tensors: dicts, lists, numbers and strings.
        tensors: What this rank holds of the tensors, by their path in the state: a tensor, or its part of one that is
            spread over ranks, in several pieces where it is several boxes of the whole. One that is there twice (tied
            weights) is here once. They are those of the state, not copies, and those that the state has on disk are
            still there.
        places: Where the pieces lie, by the names they have in ``tensors``; what is not here is whole.
        aliases: Further paths of tensors, each with the path it is kept under.
        elsewhere: What stands by path for tensors of which only other ranks have something.
        mine: The names of the tensors that this rank writes, where ranks have found out who has what; else its parts,
            and on rank 0 what is not spread over ranks.
    """

    plain: Any
    tensors: Mapping[str, Any]
    places: Mapping[str, Place] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Mapping[str, Elsewhere] = field(default_factory=dict)
    mine: frozenset[str] | None = None

    def owned(self, rank: int) -> dict[str, Any]:
        """Returns the tensors that a rank writes, by name."""
        return {name: tensor for name, tensor in self.tensors.items() if self._owns(name, tensor, rank)}

    def _owns(self, name: str, tensor: Any, rank: int) -> bool:
        place = self.places.get(name)
        if place is not None and tensor.numel() == 0:
            return False
        if self.mine is not None:
            return name in self.mine
        return rank == 0 if place is None else place.writes

    def wholes(self) -> dict[str, Elsewhere]:
        """Returns shape and dtype of every tensor, by path."""
        found = dict(self.elsewhere)
        for name, tensor in self.tensors.items():
            place = self.places.get(name)
            if place is None:
                found[name] = Elsewhere(tuple(tensor.shape), tensor.dtype)
            else:
                found[place.path] = Elsewhere(place.shape, place.dtype)
        return found


def take_apart(state: Mapping[str, Any]) -> Image:
    """Returns the image of a state.

    Raises:
        CheckpointError: The state holds what is neither a tensor nor plain data.

    Example:
        >>> image = take_apart({"model": {"weight": torch.zeros(2)}, "step": 3})
        >>> image.plain, list(image.tensors)
        ({'model': {'weight': {'__tensor__': 'model/weight'}}, 'step': 3}, ['model/weight'])
    """
    tensors = _Tensors()
    plain = _split(state, "", tensors)
    return Image(plain, tensors.by_name, tensors.places, tensors.aliases, tensors.elsewhere)


def put_together(image: Image) -> Any:
    """Returns the state of an image.

    Raises:
        KeyError: A tensor is missing.
    """
    return _join(image.plain, image.tensors)


class _Tensors:
    """The tensors of a state by name."""

    def __init__(self) -> None:
        self.by_name: dict[str, Any] = {}
        self.places: dict[str, Place] = {}
        self.aliases: dict[str, str] = {}
        self.elsewhere: dict[str, Elsewhere] = {}
        self._paths: dict[tuple[Any, ...], str] = {}

    def keep(self, tensor: Any, path: str) -> str:
        """Keeps a tensor, and returns the path it is found under."""
        if isinstance(tensor, Elsewhere):
            self.elsewhere[path] = tensor
            return path
        if isinstance(tensor, Stored):
            first = self._paths.setdefault((id(tensor),), path)
            self.by_name[first] = tensor
            return first
        places = _places_of(tensor, path) if is_spread(tensor) else []
        held = local(tensor.detach())
        offsets = tuple(place.offset for _, place in places)
        same = (
            held.data_ptr(),
            tuple(held.shape),
            held.stride(),
            held.dtype,
            held.device,
            tuple(tensor.shape),
            offsets,
        )
        if held.numel() and same in self._paths:
            # Where another rank's part is empty, or it has none, it cannot see that the two are one.
            self.aliases[path] = self._paths[same]
            return self._paths[same]
        if not places:
            self.by_name[path] = held
        for number, (inside, place) in enumerate(places):
            name = f"{path}{_PIECE}{number}" if number else path
            self.by_name[name] = held[inside] if len(places) > 1 else held
            self.places[name] = place
        self._paths[same] = path
        return path


def _places_of(tensor: torch.Tensor, path: str) -> list[tuple[Box, Place]]:
    """The boxes of a tensor that this rank has: where in its part, and where in the whole."""
    shape, first, holders = tuple(tensor.shape), writes(tensor), holders_of(tensor)
    return [
        (inside, Place(path, shape, tensor.dtype, tuple(along.start for along in box), first, holders))
        for inside, box in boxes_of(tensor)
    ]


def _split(value: Any, path: str, tensors: _Tensors) -> Any:
    """Returns plain data, with tensors moved to `tensors` and a mark in their place."""
    if isinstance(value, (torch.Tensor, Stored, Elsewhere)):
        return {TENSOR: tensors.keep(value, path)}
    if isinstance(value, Mapping):
        if all(isinstance(key, int) and not isinstance(key, bool) for key in value) and value:
            items = [[key, _split(child, f"{path}/{key}", tensors)] for key, child in value.items()]
            return {NUMBERED: items}
        for key in value:
            if not isinstance(key, str) or key in (TENSOR, TUPLE, NUMBERED):
                raise CheckpointError(
                    f"The state has the key {key!r} at {path or 'its top'}; keys must be strings, or all whole numbers."
                )
        return {key: _split(child, f"{path}/{key}" if path else key, tensors) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_split(child, f"{path}/{place}", tensors) for place, child in enumerate(value)]
        return {TUPLE: items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(
        f"The state at {path!r} is a {type(value).__name__}; a checkpoint holds tensors, numbers, strings, lists and "
        "dicts."
    )


def _join(value: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        if TENSOR in value:
            return tensors[value[TENSOR]]
        if NUMBERED in value:
            return {key: _join(child, tensors) for key, child in value[NUMBERED]}
        if TUPLE in value:
            return tuple(_join(child, tensors) for child in value[TUPLE])
        return {key: _join(child, tensors) for key, child in value.items()}
    if isinstance(value, list):
        return [_join(child, tensors) for child in value]
    return value
