"""The weights of a checkpoint as others want them: raw or averaged, tied ones once, in a dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from paraflow.checkpoint.stored import Stored
from paraflow.errors import CheckpointError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, eq=False)
class Cast:
    """A tensor on disk that is converted while it is read.

    Attributes:
        name: What it is called, for the error.
        source: The tensor.
        dtype: What it is converted to.
    """

    name: str
    source: Stored
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""
        return self.source.shape

    @property
    def nbytes(self) -> int:
        """The bytes of the whole, converted."""
        return prod(self.shape) * self.dtype.itemsize

    def rows(self, most: int) -> Iterator[torch.Tensor]:
        """Reads the whole, some rows at a time: as many as fit in so many bytes with what the conversion takes.

        Raises:
            CheckpointError: A number is too large for the dtype.
        """
        for part in self.source.rows(most // 4):
            converted = part.to(self.dtype)
            if not torch.equal(part.isinf(), converted.isinf()):
                raise CheckpointError(
                    f"{self.name!r} has numbers up to {part[part.isfinite()].abs().max():.3g}, and {self.dtype} holds "
                    f"{torch.finfo(self.dtype).max:.3g} at most. Export in 'bf16' or 'fp32'."
                )
            yield converted


def model_in(state: Mapping[str, Any], folder: Path) -> dict[str, Stored]:
    """Returns the model's tensors of a checkpoint's state, by name.

    Raises:
        CheckpointError: There are none.
    """
    model = state.get("model")
    if not isinstance(model, dict) or not model or not all(isinstance(value, Stored) for value in model.values()):
        raise CheckpointError(f"The checkpoint {str(folder)!r} holds no model: tensors by name.")
    return model


def averages_in(state: Mapping[str, Any], folder: Path, callback: str | None = None) -> dict[str, Stored]:
    """Returns the averages that a callback has kept of weights, by name.

    Args:
        state: A checkpoint's.
        folder: The checkpoint, for the error.
        callback: The callback's class, such as ``"EMA"``; None where only one has kept any.

    Raises:
        CheckpointError: There are none, or those of several callbacks.
    """
    callbacks = state.get("callbacks")
    states = callbacks.items() if isinstance(callbacks, dict) else ()
    found = {key: one["averages"] for key, one in states if isinstance(one, dict) and one.get("averages")}
    named = {key: one for key, one in found.items() if callback in (None, key, key.rpartition("-")[0])}
    if not named:
        of = "" if callback is None else f" of {callback!r}"
        there = (
            f"it has those of {' and '.join(found)}" if found else "it was saved without EMA or another that keeps them"
        )
        raise CheckpointError(f"The checkpoint {str(folder)!r} has no averages{of}: {there}.")
    if len(named) > 1:
        raise CheckpointError(
            f"The checkpoint {str(folder)!r} has averages of {' and '.join(named)}. Name one of them: "
            f"averages={next(iter(named))!r}, or --averages-of {next(iter(named))}."
        )
    return dict(next(iter(named.values())))


def ties_in(model: Mapping[str, Stored]) -> dict[str, str]:
    """Returns the names of a model's tensors that are there under an earlier name too, each with that name."""
    firsts: dict[Any, str] = {}
    found = {name: firsts.setdefault(tensor.pieces or name, name) for name, tensor in model.items()}
    return {name: first for name, first in found.items() if name != first}


def converted(tensors: Mapping[str, Stored], dtype: str | None) -> dict[str, Stored | Cast]:
    """Returns tensors of which those of a floating dtype will be read in another; None leaves them as they are.

    Raises:
        CheckpointError: There is no such dtype.
    """
    if dtype is None:
        return dict(tensors)
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype must be one of {', '.join(map(repr, DTYPES))}, not {dtype!r}.")
    wanted = DTYPES[dtype]
    return {
        name: Cast(name, tensor, wanted) if _is_number(tensor.dtype) and tensor.dtype != wanted else tensor
        for name, tensor in tensors.items()
    }


def _is_number(dtype: torch.dtype) -> bool:
    """Whether a dtype is that of weights; eight bits are not, for they need a scale beside them."""
    return dtype.is_floating_point and dtype.itemsize > 1
