"""What ranks hold of a tensor, put together in the process that compares, without a collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paraflow.parts import Elsewhere, boxes_of, local, map_values


@dataclass(frozen=True)
class Piece:
    """This rank's part of a tensor, and the boxes that it is of the whole; None is held by another stage."""

    held: torch.Tensor | None
    boxes: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


def pieces_of(state: Any) -> Any:
    """Returns a state with a piece for each tensor of it."""
    return map_values(state, _piece)


def _piece(value: Any) -> Any:
    if isinstance(value, Elsewhere):
        return Piece(None, (), value.shape, value.dtype)
    if not isinstance(value, torch.Tensor):
        return value
    boxes = tuple((_edges(inside), _edges(outside)) for inside, outside in boxes_of(value))
    return Piece(local(value).detach().cpu().clone(), boxes, tuple(value.shape), value.dtype)


def _edges(box: Sequence[slice]) -> tuple[tuple[int, int], ...]:
    return tuple((part.start, part.stop) for part in box)


def _slices(edges: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in edges)


def joined(states: Sequence[Any]) -> Any:
    """Returns the whole state of all ranks' pieces; those that hold the same part must hold the same, to the bit."""
    first = states[0]
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for state in states for key in state)  # a stage has state of its own parameters only
        return {key: joined([state[key] for state in states if key in state]) for key in keys}
    if not isinstance(first, Piece):
        assert all(state == first for state in states)
        return first
    assert all((piece.shape, piece.dtype) == (first.shape, first.dtype) for piece in states)
    tensor = torch.empty(first.shape, dtype=first.dtype)
    there = torch.zeros(first.shape, dtype=torch.bool)
    for piece in states:
        for inside, outside in piece.boxes:
            place, held = _slices(outside), piece.held[_slices(inside)]
            assert torch.equal(tensor[place][there[place]], held[there[place]]), "replicas differ"
            tensor[place], there[place] = held, True
    assert bool(there.all()), "no rank holds a part of it"
    return tensor
