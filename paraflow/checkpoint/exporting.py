"""Gives a checkpoint's weights to others: as safetensors, and for a transformers model as a folder of its kind."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paraflow.checkpoint.folders import find, saved_in
from paraflow.checkpoint.format import is_checkpoint, sync
from paraflow.checkpoint.reading import take, verify
from paraflow.checkpoint.tensors import size_of, write_tensors
from paraflow.checkpoint.weights import averages_in, converted, model_in, ties_in
from paraflow.errors import CheckpointError
from paraflow.plan_memory import as_text, bytes_of

_SUFFIX, _FILE, _INDEX = ".safetensors", "model.safetensors", "model.safetensors.index.json"
_SHARDS = "model-*-of-*.safetensors"
_MOST = "5GB"
_HEADERS = 2**20
"""Room for what is written beside the tensors."""


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        checkpoint: The checkpoint that it was taken from.
        files: The files.
        tensors: The number of tensors in them.
        bytes: The bytes of these.
    """

    checkpoint: Path
    files: tuple[Path, ...]
    tensors: int
    bytes: int


@dataclass(frozen=True)
class _Weights:
    """Tensors by name, further names of them, and the files of text that belong to them."""

    tensors: Mapping[str, Any]
    ties: Mapping[str, str]
    texts: Mapping[str, str]

    def write(self, path: Path, names: Sequence[str]) -> None:
        """Writes some of the tensors to a file; further names are noted as safetensors' own `load_model` wants them."""
        ties = {name: first for name, first in self.ties.items() if first in names}
        write_tensors(path, {name: self.tensors[name] for name in names}, {**ties, "format": "pt"})
        sync(path)


def export(
    path: str | Path,
    out: str | Path,
    *,
    best: bool = False,
    averages: bool | str = False,
    dtype: str | None = None,
    max_shard: str | int | None = None,
    force: bool = False,
) -> Exported:
    """Writes the weights of a checkpoint, saved under whatever plan, as safetensors; it needs no process group.

    Weights go from file to file in pieces of 64 MiB at most. Tied ones are written once, under their first name. What
    is written appears whole or not at all.

    Args:
        path: A checkpoint, or a folder of them, of which the newest is taken.
        out: A ``.safetensors`` file, or a folder: for ``model.safetensors``, or shards of it and
            ``model.safetensors.index.json``; for a transformers model also ``config.json``, so that ``from_pretrained``
            takes it.
        best: Whether the checkpoint with the best monitored value is taken instead.
        averages: Whether averaged weights are written where a callback (`EMA`, `StochasticWeightAveraging`) has kept
            them, and the raw ones elsewhere; the callback's class where several have.
        dtype: ``"fp32"``, ``"bf16"`` or ``"fp16"`` for tensors of a floating dtype; None leaves them as they are.
        max_shard: The most bytes of tensors in one file of a folder, such as ``"5GB"``; None is that.
        force: Whether weights that are there already are replaced; other files in the folder stay.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, it has no such averages, ``out`` is taken, or the disk
            refuses it.
        PlanError: ``max_shard`` is no size.
    """
    place = Path(out).resolve()
    one_file = place.suffix == _SUFFIX
    if one_file and max_shard is not None:
        raise CheckpointError(f"max_shard is for a folder, and {str(out)!r} is one file. Leave one of the two out.")
    most = bytes_of(_MOST if max_shard is None else max_shard, "max_shard")
    _require_free(place, force)
    folder = find(path, best=best)
    verify(folder)
    weights = _weights_in(folder, averages, dtype)
    _require_room(place, size_of(weights.tensors) + _HEADERS)
    with _written_aside(place) as aside:
        if one_file:
            weights.write(aside, list(weights.tensors))
            os.replace(aside, place)
            files = [place]
        else:
            aside.mkdir()
            files = [place / name for name in _write_folder(aside, weights, most)]
            _put_in_place(aside, place)
        sync(place.parent)
    return Exported(folder, tuple(files), len(weights.tensors), size_of(weights.tensors))


def shards_of(tensors: Mapping[str, Any], most: int) -> list[list[str]]:
    """Returns which tensors, by name, go in one file: in their order, as many as fit in so many bytes, at least one.

    Example:
        >>> import torch
        >>> shards_of({name: torch.zeros(2) for name in "abc"}, 16)
        [['a', 'b'], ['c']]
    """
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards


def _weights_in(folder: Path, averages: bool | str, dtype: str | None) -> _Weights:
    state = take(folder)
    model, about = model_in(state, folder), state.get("about") or {}
    config = about.get("config") or {}
    ties = ties_in(model)
    if config.get("tie_word_embeddings") is False:
        ties = {}  # from_pretrained would not tie them again
    if averages:
        averaged = averages_in(state, folder, averages if isinstance(averages, str) else None)
        model = {name: averaged.get(name, tensor) for name, tensor in model.items()}
    tensors = converted({name: tensor for name, tensor in model.items() if name not in ties}, dtype)
    return _Weights(tensors, ties, _configs(about, tensors))


def _configs(about: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, str]:
    """A transformers model's configs, as its `save_pretrained` writes them."""
    configs = {name: dict(about[name]) for name in ("config", "generation_config") if about.get(name)}
    if "config" in configs:
        config = configs["config"]
        floating = [tensor.dtype for tensor in tensors.values() if tensor.dtype.is_floating_point]
        # transformers has called it torch_dtype until 4.55.
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config["architectures"] = [about["model_class"]]
        config[key] = str(floating[0]).removeprefix("torch.") if floating else None
    return {f"{name}.json": json.dumps(config, indent=2, sort_keys=True) + "\n" for name, config in configs.items()}


def _write_folder(aside: Path, weights: _Weights, most: int) -> list[str]:
    """Writes a folder's files, and returns their names."""
    shards = shards_of(weights.tensors, most)
    count = len(shards)
    files = [f"model-{place:05d}-of-{count:05d}{_SUFFIX}" for place in range(1, count + 1)] if count > 1 else [_FILE]
    for file, names in zip(files, shards, strict=True):
        weights.write(aside / file, names)
    texts = dict(weights.texts)
    if count > 1:
        places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": size_of(weights.tensors)}, "weight_map": places}
        texts[_INDEX] = json.dumps(index, indent=2) + "\n"
    for name, text in texts.items():
        (aside / name).write_text(text, encoding="utf-8")
        sync(aside / name)
    sync(aside)
    return [*files, *texts]


def _put_in_place(aside: Path, place: Path) -> None:
    if not place.exists() or not any(place.iterdir()):
        os.replace(aside, place)
        return
    # Other files stay. Weights are gone before new ones come, and what makes weights of the files comes last.
    for old in (place / _INDEX, place / _FILE, *place.glob(_SHARDS)):
        old.unlink(missing_ok=True)
    for new in sorted(aside.iterdir(), key=lambda file: (file.name in (_INDEX, _FILE), file.name)):
        os.replace(new, place / new.name)
    sync(place)
    aside.rmdir()


def _require_free(place: Path, force: bool) -> None:
    """Refuses a place where something is that must not go."""
    one_file = place.suffix == _SUFFIX
    if is_checkpoint(place) or (place.is_dir() and saved_in(place)):
        raise CheckpointError(f"{str(place)!r} holds checkpoints; export to a folder of its own.")
    if place.exists() and place.is_dir() == one_file:
        what = "a folder, and weights are to be a file" if one_file else "a file, and weights are to be a folder"
        raise CheckpointError(f"{str(place)!r} is {what}; write another name. A file's name ends in {_SUFFIX}.")
    taken = place.exists() and (one_file or any(place.iterdir()))
    if taken and not force:
        what = "exists" if one_file else "is not empty"
        raise CheckpointError(f"{str(place)!r} {what}; write force=True (--force) to replace the weights there.")


def _require_room(place: Path, size: int) -> None:
    there = next(parent for parent in (place, *place.parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if free < size:
        raise CheckpointError(
            f"The weights take {as_text(size)}, and {str(there)!r} has {as_text(free)} left. Free some, or export in "
            "'bf16'."
        )


@contextmanager
def _written_aside(place: Path) -> Iterator[Path]:
    """A name to write to, beside the place; what is there afterwards goes."""
    aside = place.with_name(f".{place.name}.writing")
    try:
        _discard(aside)
        place.parent.mkdir(parents=True, exist_ok=True)
        yield aside
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            why += f": {as_text(shutil.disk_usage(place.parent).free)} are left"
        raise CheckpointError(f"{str(place)!r} could not be written: {why}.") from error
    finally:
        _discard(aside)


def _discard(aside: Path) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    with suppress(OSError):
        aside.unlink()
