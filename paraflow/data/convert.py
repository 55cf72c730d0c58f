"""From what users have (arrays, datasets, loaders, iterables) to a source."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from paraflow.data.batch import children
from paraflow.data.order import shuffled
from paraflow.data.source import ArraySource, Chunks, DatasetSource, IndexBatchSource, Source, sampler_order
from paraflow.data.stream import PerRank, PerRankSource, StreamSource
from paraflow.errors import DataError

DEFAULT_BATCH_SIZE = 32
"""Samples of a step where nobody says."""

_LOADER_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
)


def as_source(data: Any, *, batch_size: int | None, shuffle: bool, name: str = "data") -> Source:
    """Makes a source of what a user passes.

    Args:
        data: Tensors or numpy arrays (alone, or in a tuple, a dict or a dataclass), a map-style or iterable dataset, a
            DataLoader, an iterable of batches or a function that returns one, `PerRank`, or a source. A list holds
            samples where `batch_size` is given, and batches where it is not.
        batch_size: Samples of one step over all ranks; None takes the loader's own, or 32.
        shuffle: Whether arrays and datasets are shuffled each epoch; a loader decides for itself.
        name: What the data is called in errors.

    Raises:
        DataError: The data is empty, of a kind that is not understood, or batched already.
    """
    _require_batch_size(batch_size, name)
    source = _convert(data, batch_size, shuffle, name)
    if source.length == 0:
        raise DataError(f"The {name} has no batch: it is empty, or drop_last leaves nothing of it.")
    return source


def as_validation_source(data: Any, batch_size: int | None) -> Source:
    """Makes a source of validation data; the training data's batch size holds for it unless it is batched already."""
    batched = isinstance(data, (DataLoader, PerRank)) or hasattr(data, "read")
    countable = hasattr(data, "__getitem__") or isinstance(data, IterableDataset) or _is_tree(data)
    size = batch_size if countable and not batched else None
    return as_source(data, batch_size=size, shuffle=False, name="validation data")


def _convert(data: Any, batch_size: int | None, shuffle: bool, name: str) -> Source:
    if isinstance(data, PerRank):
        _refuse_batch_size(batch_size, name, "a per-rank stream")
        return PerRankSource(data)
    if isinstance(data, (str, bytes)) or data is None:
        raise DataError(f"The {name} is {data!r}; give arrays, a dataset, a DataLoader or an iterable of batches.")
    if callable(getattr(data, "read", None)) and hasattr(data, "length"):
        source: Source = data
        return source
    if isinstance(data, DataLoader):
        return _from_loader(data, batch_size, name)
    arrays = _as_arrays(data, name)
    if arrays is not None:
        return ArraySource(arrays, batch_size or DEFAULT_BATCH_SIZE, shuffle=shuffle)
    if isinstance(data, IterableDataset):
        return StreamSource(DataLoader(data, batch_size=batch_size or DEFAULT_BATCH_SIZE))
    if _is_dataset(data, batch_size):
        return _from_dataset(data, batch_size, shuffle, name)
    return _from_iterable(data, batch_size, name)


def _is_dataset(data: Any, batch_size: int | None) -> bool:
    """A list is one of samples where a batch size is given, and of batches where none is."""
    if isinstance(data, (list, tuple)):
        return batch_size is not None
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Mapping)


def _as_arrays(data: Any, name: str) -> Any | None:
    """Returns a tree of tensors for what holds nothing but arrays with as many rows, else None."""
    if type(data) is TensorDataset:
        data = data.tensors
    if isinstance(data, list):
        return None  # a list holds samples, not columns
    leaves = list(_leaves(data))
    arrays = [isinstance(leaf, (np.ndarray, torch.Tensor)) for leaf in leaves]
    if not all(arrays) or not arrays:
        if any(arrays) or _is_tree(data):
            raise DataError(
                f"The {name} is a {type(data).__name__}; give arrays: a container of data, such as (x, y), must hold "
                "tensors or numpy arrays only, with one row a sample."
            )
        return None
    lengths = {len(leaf) if leaf.ndim else None for leaf in leaves}
    if len(lengths) > 1 or None in lengths:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
        raise DataError(f"The arrays of the {name} have different numbers of samples: their shapes are {shapes}.")
    if lengths == {0}:
        raise DataError(f"The {name} has no sample: its arrays have no rows.")
    return _to_tensors(data, name)


def _is_tree(data: Any) -> bool:
    """Whether data is a container of columns, as a batch is."""
    return isinstance(data, (tuple, Mapping)) or (dataclasses.is_dataclass(data) and not isinstance(data, type))


def _leaves(data: Any) -> Iterator[Any]:
    inner = list(children(data))
    if not inner:
        yield data
    for child in inner:
        yield from _leaves(child)


def _to_tensors(data: Any, name: str) -> Any:
    if isinstance(data, np.ndarray):
        return _from_numpy(data, name)
    if isinstance(data, torch.Tensor):
        return data.detach()
    if isinstance(data, Mapping):
        return {key: _to_tensors(child, name) for key, child in data.items()}
    if hasattr(data, "_fields"):
        return type(data)(*(_to_tensors(child, name) for child in data))
    if isinstance(data, tuple):
        return tuple(_to_tensors(child, name) for child in data)
    changes = {f.name: _to_tensors(getattr(data, f.name), name) for f in dataclasses.fields(data) if f.init}
    return dataclasses.replace(data, **changes)


def _from_numpy(array: np.ndarray[Any, Any], name: str) -> torch.Tensor:
    try:
        # As in Keras: float64 is numpy's default and no model's.
        wide = array.dtype == np.float64
        return torch.from_numpy(array.astype(np.float32) if wide else np.ascontiguousarray(array))
    except TypeError as error:
        raise DataError(
            f"The {name} has a numpy array of dtype {array.dtype}, which cannot become a tensor; give numbers (encode "
            "text, split objects)."
        ) from error


def _from_dataset(dataset: Any, batch_size: int | None, shuffle: bool, name: str) -> Source:
    samples = len(dataset)
    if samples == 0:
        raise DataError(f"The {name} has no sample: len({type(dataset).__name__}) is 0.")
    chunks = Chunks(samples, batch_size or DEFAULT_BATCH_SIZE)
    return DatasetSource(dataset, chunks, lambda seed, epoch: shuffled(samples, seed, epoch) if shuffle else None, {})


def _from_loader(loader: DataLoader[Any], batch_size: int | None, name: str) -> Source:
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        _refuse_batch_size(batch_size, name, "a DataLoader whose batches come ready-made")
        return StreamSource(loader)
    options = {option: getattr(loader, option) for option in _LOADER_OPTIONS}
    if type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
        _refuse_batch_size(batch_size, name, "a DataLoader with a batch_sampler of its own")
        return IndexBatchSource(loader.dataset, loader.batch_sampler, options)
    if batch_size not in (None, loader.batch_size):
        raise DataError(
            f"The {name} is a DataLoader with batch_size={loader.batch_size}, and fit was given "
            f"batch_size={batch_size}. Say it in one place; it counts the samples of a step over all ranks."
        )
    samples = _sampler_length(loader, name)
    chunks = Chunks(samples, loader.batch_size, bool(loader.drop_last))
    if _collates_columns(loader):
        columns = tuple(loader.dataset.tensors)  # type: ignore[attr-defined]
        shuffle = type(loader.sampler) is RandomSampler
        return ArraySource(columns, loader.batch_size, shuffle=shuffle, drop_last=bool(loader.drop_last))
    return DatasetSource(loader.dataset, chunks, sampler_order(loader.sampler, samples), options)


def _collates_columns(loader: DataLoader[Any]) -> bool:
    """Whether collating this loader's samples is the same as indexing columns of tensors once."""
    if type(loader.dataset) is not TensorDataset or loader.collate_fn is not default_collate or loader.num_workers:
        return False
    plain_random = type(loader.sampler) is RandomSampler and not loader.sampler.replacement
    plain = plain_random or type(loader.sampler) is SequentialSampler
    return plain and _length(loader.sampler) == len(loader.dataset)


def _sampler_length(loader: DataLoader[Any], name: str) -> int:
    # A DistributedSampler has the length of one rank's part, and is divided anew.
    divided = type(loader.sampler) is DistributedSampler
    samples = _length(loader.dataset if divided else loader.sampler)
    if samples is None:
        raise DataError(
            f"The sampler {type(loader.sampler).__name__} of the {name} has no length, so its order cannot be "
            "divided over ranks or resumed. Give it a __len__, or pass an IterableDataset."
        )
    if samples == 0:
        raise DataError(f"The {name} is a DataLoader without a sample.")
    return samples


def _length(thing: Any) -> int | None:
    return len(thing) if hasattr(thing, "__len__") else None


def _from_iterable(data: Any, batch_size: int | None, name: str) -> Source:
    if not callable(data) and not isinstance(data, Iterable):
        raise DataError(
            f"The {name} is a {type(data).__name__}; give arrays, a dataset, a DataLoader, an iterable of batches or a "
            "function that returns one."
        )
    _refuse_batch_size(batch_size, name, "an iterable, which yields whole batches")
    return StreamSource(data)


def _require_batch_size(batch_size: int | None, name: str) -> None:
    if batch_size is None or (isinstance(batch_size, int) and not isinstance(batch_size, bool) and batch_size > 0):
        return
    raise DataError(f"batch_size must be a whole number of at least 1, not {batch_size!r} (for the {name}).")


def _refuse_batch_size(batch_size: int | None, name: str, kind: str) -> None:
    if batch_size is not None:
        raise DataError(f"batch_size={batch_size} was given, but the {name} is {kind}. Leave batch_size out.")
