"""A state taken apart for the disk: its tensors by path, and plain data with a mark where each tensor belongs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paraflow.errors import CheckpointError

_TENSOR, _TUPLE, _NUMBERED = "__tensor__", "__tuple__", "__numbered__"


@dataclass(frozen=True)
class Image:
    """A state, taken apart.

    Attributes:
        plain: Everything but the tensors: dicts, lists, numbers and strings.
        tensors: The tensors by their path in the state; one that is there twice (tied weights) is here once. They are
            those of the state, not copies.
    """

    plain: Any
    tensors: Mapping[str, torch.Tensor]


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
    return Image(plain, tensors.by_path)


def put_together(image: Image) -> Any:
    """Returns the state of an image.

    Raises:
        KeyError: A tensor is missing.
    """
    return _join(image.plain, image.tensors)


class _Tensors:
    """The tensors of a state by their path."""

    def __init__(self) -> None:
        self.by_path: dict[str, torch.Tensor] = {}
        self._paths: dict[tuple[Any, ...], str] = {}

    def keep(self, tensor: torch.Tensor, path: str) -> str:
        """Keeps a tensor, and returns the path it is found under."""
        tensor = tensor.detach()
        same = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and same in self._paths:
            return self._paths[same]
        self.by_path[path] = tensor
        self._paths[same] = path
        return path


def _split(value: Any, path: str, tensors: _Tensors) -> Any:
    """Returns plain data, with tensors moved to `tensors` and a mark in their place."""
    if isinstance(value, torch.Tensor):
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


def _join(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
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
