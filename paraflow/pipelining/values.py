"""The tensors in what functions are called with and return, at any depth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

Leaf = Callable[[Any], Any]


def tensors_in(value: Any, kind: type | tuple[type, ...] = torch.Tensor) -> list[Any]:
    """Returns the tensors in a value in a fixed order; one that is there twice comes twice.

    Args:
        value: Containers of any depth: tuples, lists, mappings, slices, dataclasses, and what is registered as a tree
            with torch, as the outputs of transformers are.
        kind: What counts as a tensor.

    Example:
        >>> tensors_in(({"x": torch.ones(1)}, [2, slice(torch.zeros(2), None)]))
        [tensor([1.]), tensor([0., 0.])]
    """
    found: list[Any] = []
    _visit(value, kind, found)
    return found


def _visit(value: Any, kind: type | tuple[type, ...], found: list[Any]) -> None:
    if isinstance(value, kind):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for child in value:
            _visit(child, kind, found)
    elif not isinstance(value, _PLAIN):
        for child in _children(value):
            _visit(child, kind, found)


def tensors_kept_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value whose parts may refer to each other and back, as what a module keeps may; each part once.

    Example:
        >>> kept = {"x": torch.ones(1)}
        >>> kept["self"] = kept
        >>> list(tensors_kept_in(kept))
        [tensor([1.])]
    """
    waiting, seen = [value], set[int]()
    while waiting:
        part = waiting.pop()
        if isinstance(part, torch.Tensor):
            yield part
        elif not isinstance(part, _PLAIN) and id(part) not in seen:
            seen.add(id(part))
            waiting.extend(part if isinstance(part, (tuple, list)) else _children(part))


def rebuilt(value: Any, function: Leaf, kind: type | tuple[type, ...] = torch.Tensor) -> Any:
    """Returns a value with the function applied to each tensor in it, in the order of `tensors_in`.

    A container in which nothing changes is returned itself, so that what a module writes into it is seen by others.

    Example:
        >>> given = {"x": torch.ones(1), "names": ["a"]}
        >>> changed = rebuilt(given, lambda t: t + 1)
        >>> changed, changed["names"] is given["names"]
        ({'x': tensor([2.]), 'names': ['a']}, True)
    """
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, _PLAIN):
        return value
    children = list(value) if isinstance(value, (tuple, list)) else _children(value)
    if not children:
        return value
    changed = [rebuilt(child, function, kind) for child in children]
    if all(new is old for new, old in zip(changed, children, strict=True)):
        return value
    return _with_children(value, changed)


_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.nn.Module, type)


def _children(value: Any) -> list[Any]:
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    if isinstance(value, Mapping):
        return list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value) if field.init]
    node = _registered(value)
    return list(node.flatten_fn(value)[0]) if node is not None else []


def _with_children(value: Any, children: list[Any]) -> Any:
    if isinstance(value, slice):
        return slice(*children)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*children)
    if isinstance(value, (tuple, list)):
        return type(value)(children)
    if type(value) is dict:
        return dict(zip(value, children, strict=True))
    node = _registered(value)
    if node is not None:
        return node.unflatten_fn(children, node.flatten_fn(value)[1])
    if isinstance(value, Mapping):
        make: Any = type(value)
        return make(dict(zip(value, children, strict=True)))
    names = [field.name for field in dataclasses.fields(value) if field.init]
    return dataclasses.replace(value, **dict(zip(names, children, strict=True)))


def _registered(value: Any) -> Any:
    from torch.utils import _pytree

    return _pytree.SUPPORTED_NODES.get(type(value))
