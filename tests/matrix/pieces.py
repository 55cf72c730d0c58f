"""What ranks hold of a tensor, put together in the process that compares, without a collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paraflow.parts import box_of, local, map_values


@dataclass(frozen=True)
class Piece:
    """This rank's part of a tensor, and where it lies in the whole."""

    held: torch.Tensor
    box: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]


def pieces_of(state: Any) -> Any:
    """Returns a state with a piece for each tensor of it."""
    return map_values(state, lambda value: _piece(value) if isinstance(value, torch.Tensor) else value)


def _piece(tensor: torch.Tensor) -> Piece:
    box = tuple((part.start, part.stop) for part in box_of(tensor))
    return Piece(local(tensor).detach().cpu().clone(), box, tuple(tensor.shape))


def joined(states: Sequence[Any]) -> Any:
    """Returns the whole state of all ranks' pieces; those that hold the same part must hold the same, to the bit."""
    first = states[0]
    if isinstance(first, Mapping):
        assert all(state.keys() == first.keys() for state in states)
        return {key: joined([state[key] for state in states]) for key in first}
    if not isinstance(first, Piece):
        assert all(state == first for state in states)
        return first
    tensor = torch.empty(first.shape, dtype=first.held.dtype)
    there = torch.zeros(first.shape, dtype=torch.bool)
    for piece in states:
        place = tuple(slice(*edges) for edges in piece.box)
        assert torch.equal(tensor[place][there[place]], piece.held[there[place]]), "replicas differ"
        tensor[place], there[place] = piece.held, True
    assert bool(there.all()), "no rank holds a part of it"
    return tensor
