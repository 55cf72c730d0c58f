"""What a batch may look like, and the few things that are done to one.

A batch is a tensor, or a tuple, list, mapping or dataclass of batches; anything else in it is carried along as it is.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paraflow.errors import DataError


@dataclass(slots=True)
class MicroBatch:
    """What this rank runs forward on at once.

    Attributes:
        data: The batch that the model's step is given.
        samples: How many samples it holds; 0 marks a stand-in, run only so that every rank takes part in a step's
            collectives, and counted nowhere.
    """

    data: Any
    samples: int


@dataclass(slots=True)
class Batch:
    """This rank's share of what one optimizer step sees.

    Attributes:
        micro_batches: The share, in the order it is run; as many on every rank.
        samples: The number of samples over all ranks.
        shares: The number of samples of each data rank.
        last: Whether the epoch ends with it.
    """

    micro_batches: list[MicroBatch]
    samples: int
    shares: tuple[int, ...]
    last: bool = False


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """Returns the batch with the function applied to each tensor in it, at any depth.

    Example:
        >>> map_tensors(lambda t: t + 1, {"x": torch.zeros(2), "names": ["a", "b"]})
        {'x': tensor([1., 1.]), 'names': ['a', 'b']}
    """
    if isinstance(batch, torch.Tensor):
        return function(batch)
    return _map_children(lambda child: map_tensors(function, child), batch)


def tensors_of_arrays(batch: Any) -> Any:
    """Returns the batch with numpy arrays of numbers as tensors; float64, numpy's default, becomes float32."""
    if isinstance(batch, np.ndarray):
        if batch.dtype == object or batch.dtype.kind in "USM":
            return batch
        return torch.from_numpy(np.ascontiguousarray(batch, np.float32 if batch.dtype == np.float64 else batch.dtype))
    return batch if isinstance(batch, torch.Tensor) else _map_children(tensors_of_arrays, batch)


def _map_children(function: Callable[[Any], Any], batch: Any) -> Any:
    """Rebuilds a container with the function applied to its children; anything else comes back as it is."""
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(function(child) for child in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(function(child) for child in batch)
    if isinstance(batch, dict) and type(batch) is dict:
        return {key: function(child) for key, child in batch.items()}
    if isinstance(batch, Mapping):
        return _rebuild_mapping(batch, {key: function(child) for key, child in batch.items()})
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        changes = {f.name: function(getattr(batch, f.name)) for f in dataclasses.fields(batch) if f.init}
        return dataclasses.replace(batch, **changes)
    return batch


def _rebuild_mapping(like: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Mappings such as transformers' BatchEncoding are made from a dict, and keep their type."""
    make: Any = type(like)
    try:
        return make(values)
    except TypeError:
        return values


def children(batch: Any) -> Iterator[Any]:
    """Yields what a container holds; nothing for a leaf."""
    if isinstance(batch, Mapping):
        yield from batch.values()
    elif isinstance(batch, (tuple, list)):
        yield from batch
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        yield from (getattr(batch, f.name) for f in dataclasses.fields(batch))


def count_rows(batch: Any) -> int:
    """Returns the number of samples in a batch: the length of its first tensor that has one.

    Raises:
        DataError: No tensor in the batch has a first dimension.

    Example:
        >>> count_rows({"id": torch.tensor(7), "x": torch.zeros(5, 3), "y": torch.zeros(5)})
        5
    """
    found = _first_length(batch)
    if found is None:
        raise DataError(
            f"A batch of type {type(batch).__name__} holds no tensor with a first dimension, so its samples cannot be "
            "counted. Give batches of tensors whose first dimension is the sample."
        )
    return found


def warn_if_ragged(batch: Any) -> None:
    """Warns where the first tensor's length may not be the number of samples: another length is at least as common."""
    shapes = [tuple(tensor.shape) for tensor in _tensors(batch) if tensor.dim()]
    lengths = Counter(shape[0] for shape in shapes)
    first = lengths.pop(shapes[0][0])
    if lengths and max(lengths.values()) >= first:
        warnings.warn(
            f"The tensors of a batch have different numbers of rows: {', '.join(map(str, shapes[:5]))}. It is taken to "
            f"hold {shapes[0][0]} samples, for the first tensor has so many rows. Put a tensor with one row a sample "
            "first, or the batch is divided and its loss weighed otherwise than meant.",
            stacklevel=2,
        )


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
        return
    for child in children(batch):
        yield from _tensors(child)


def _first_length(batch: Any) -> int | None:
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else None
    return next((n for n in map(_first_length, children(batch)) if n is not None), None)


def take_rows(batch: Any, start: int, stop: int, rows: int | None = None) -> Any:
    """Returns the samples from ``start`` to ``stop`` of a batch.

    Tensors whose first dimension is the number of samples are cut, and so are lists of as many things; what does not
    have one entry a sample (a scalar, a shared table) comes along whole.

    Raises:
        DataError: The batch has no rows to cut.
    """
    rows = count_rows(batch) if rows is None else rows
    if start == 0 and stop == rows:
        return batch
    if isinstance(batch, torch.Tensor):
        return batch[start:stop] if batch.dim() and batch.shape[0] == rows else batch
    if _is_column(batch, rows):
        return batch[start:stop]
    return _map_children(lambda child: take_rows(child, start, stop, rows), batch)


def _is_column(batch: Any, rows: int) -> bool:
    """Whether a list holds one plain thing (a name, a number) for each sample."""
    plain = isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields") and len(batch) == rows
    return plain and not any(
        isinstance(child, (torch.Tensor, Sequence, Mapping)) and not isinstance(child, (str, bytes)) for child in batch
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """Returns the batch with its tensors on a device; host memory that is pinned is copied without waiting."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)
