"""A state taken apart for the disk: its tensors by path, and plain data with a mark where each tensor belongs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from paraflow.checkpoint.stored import Stored
from paraflow.errors import CheckpointError
from paraflow.parts import box_of, is_spread, local, writes

_TENSOR, _TUPLE, _NUMBERED = "__tensor__", "__tuple__", "__numbered__"


@dataclass(frozen=True)
class Place:
    """Where in a tensor that is spread over ranks this rank's part lies.

    Attributes:
        shape: The shape of the whole.
        dtype: Its dtype.
        offset: Where the part begins, along each dimension.
        writes: Whether this rank is the first of those that hold the same part, and so writes it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: tuple[int, ...]
    writes: bool


@dataclass(frozen=True)
class Image:
    """A state, taken apart.

    Attributes:
        plain: Everything but the tensors: dicts, lists, numbers and strings.
        tensors: What this rank holds of the tensors, by their path in the state: a tensor, or its part of one that is
            spread over ranks. One that is there twice (tied weights) is here once. They are those of the state, not
            copies, and those that the state has on disk are still there.
        places: Where the parts lie, by path; what is not here is whole.
        aliases: Further paths of parts, each with the path it is kept under.
    """

    plain: Any
    tensors: Mapping[str, Any]
    places: Mapping[str, Place] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    def owned(self, rank: int) -> dict[str, Any]:
        """Returns the tensors that a rank writes: its parts, and on rank 0 what is not spread over ranks."""
        return {path: tensor for path, tensor in self.tensors.items() if self._owns(path, tensor, rank)}

    def _owns(self, path: str, tensor: Any, rank: int) -> bool:
        place = self.places.get(path)
        return rank == 0 if place is None else place.writes and tensor.numel() > 0


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
    return Image(plain, tensors.by_path, tensors.places, tensors.aliases)


def put_together(image: Image) -> Any:
    """Returns the state of an image.

    Raises:
        KeyError: A tensor is missing.
    """
    return _join(image.plain, image.tensors)


class _Tensors:
    """The tensors of a state by their path."""

    def __init__(self) -> None:
        self.by_path: dict[str, Any] = {}
        self.places: dict[str, Place] = {}
        self.aliases: dict[str, str] = {}
        self._paths: dict[tuple[Any, ...], str] = {}

    def keep(self, tensor: Any, path: str) -> str:
        """Keeps a tensor, and returns the path it is found under."""
        if isinstance(tensor, Stored):
            first = self._paths.setdefault((id(tensor),), path)
            self.by_path[first] = tensor
            return first
        place = _place_of(tensor) if is_spread(tensor) else None
        held = local(tensor.detach())
        same = (held.data_ptr(), tuple(held.shape), held.stride(), held.dtype, held.device, place)
        if held.numel() and same in self._paths:
            first = self._paths[same]
            if place is not None:
                # Where another rank's part is empty, it cannot see that the two are one.
                self.aliases[path] = first
            return first
        self.by_path[path] = held
        if place is not None:
            self.places[path] = place
        self._paths[same] = path
        return path


def _place_of(tensor: torch.Tensor) -> Place:
    offset = tuple(along.start for along in box_of(tensor))
    return Place(tuple(tensor.shape), tensor.dtype, offset, writes(tensor))


def _split(value: Any, path: str, tensors: _Tensors) -> Any:
    """Returns plain data, with tensors moved to `tensors` and a mark in their place."""
    if isinstance(value, (torch.Tensor, Stored)):
        return {_TENSOR: tensors.keep(value, path)}
    if isinstance(value, Mapping):
        if all(isinstance(key, int) and not isinstance(key, bool) for key in value) and value:
            items = [[key, _split(child, f"{path}/{key}", tensors)] for key, child in value.items()]
            return {_NUMBERED: items}
        for key in value:
            if not isinstance(key, str) or key in (_TENSOR, _TUPLE, _NUMBERED):
                raise CheckpointError(
                    f"The state has the key {key!r} at {path or 'its top'}; keys must be strings, or all whole numbers."
                )
        return {key: _split(child, f"{path}/{key}" if path else key, tensors) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_split(child, f"{path}/{place}", tensors) for place, child in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(
        f"The state at {path!r} is a {type(value).__name__}; a checkpoint holds tensors, numbers, strings, lists and "
        "dicts."
    )


def _join(value: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        if _TENSOR in value:
            return tensors[value[_TENSOR]]
        if _NUMBERED in value:
            return {key: _join(child, tensors) for key, child in value[_NUMBERED]}
        if _TUPLE in value:
            return tuple(_join(child, tensors) for child in value[_TUPLE])
        return {key: _join(child, tensors) for key, child in value.items()}
    if isinstance(value, list):
        return [_join(child, tensors) for child in value]
    return value
