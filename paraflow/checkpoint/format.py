"""The checkpoint on disk: a folder with tensors in safetensors and everything else in JSON.

    step-00000100/
        tensors.safetensors     every tensor, by its path in the state
        state.json              the rest of the state, with a mark where a tensor belongs
        checksums.json          the SHA-256 of both

Nothing in it is ever unpickled, or imported by a name found in it. A folder is written beside its place, synced to the
disk and then renamed: under its own name it is whole, or it is not there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paraflow.errors import CheckpointError

VERSION = 1
_TENSORS, _STATE, _CHECKSUMS = "tensors.safetensors", "state.json", "checksums.json"
_TENSOR, _TUPLE, _NUMBERED = "__tensor__", "__tuple__", "__numbered__"


def write(folder: Path, state: Mapping[str, Any]) -> None:
    """Writes a state to a folder, which appears whole.

    Raises:
        CheckpointError: The state holds what is neither a tensor nor plain data, or the disk refuses it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = _Tensors()
    plain = {"version": VERSION, "state": _split(state, "", tensors)}
    aside = folder.with_name(f".{folder.name}.writing")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        save_file(tensors.by_path, aside / _TENSORS)
        (aside / _STATE).write_text(json.dumps(plain), encoding="utf-8")
        sums = {name: _checksum(aside / name) for name in (_TENSORS, _STATE)}
        (aside / _CHECKSUMS).write_text(json.dumps(sums), encoding="utf-8")
        for part in (aside / _TENSORS, aside / _STATE, aside / _CHECKSUMS, aside):
            _sync(part)
        _put_in_place(aside, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"The checkpoint {str(folder)!r} could not be written: {why}. What was there before is as it was."
        ) from error


def read(folder: Path) -> dict[str, Any]:
    """Reads the state of a folder; damage is found before anything is taken from it.

    Raises:
        CheckpointError: The folder is no checkpoint, is damaged, or is of another version.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    _require_intact(folder)
    try:
        plain = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        tensors = load_file(folder / _TENSORS)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"The checkpoint {str(folder)!r} cannot be read: {error}.") from error
    if plain.get("version") != VERSION:
        raise CheckpointError(
            f"The checkpoint {str(folder)!r} is of version {plain.get('version')!r}, and this Paraflow reads {VERSION}."
        )
    try:
        state: dict[str, Any] = _join(plain["state"], tensors)
    except KeyError as error:
        raise CheckpointError(f"The checkpoint {str(folder)!r} lacks the tensor {error}.") from error
    return state


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint, intact or not."""
    return (folder / _STATE).is_file()


def recover(folder: Path) -> None:
    """Puts back what had a checkpoint's name before, if writing a new one in its place was cut short in between."""
    old = folder.with_name(f".{folder.name}.old")
    if not folder.exists() and is_checkpoint(old):
        os.replace(old, folder)


def _require_intact(folder: Path) -> None:
    missing = [name for name in (_TENSORS, _STATE, _CHECKSUMS) if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{str(folder)!r} is no whole checkpoint: it has no {' and no '.join(missing)}.")
    try:
        sums = json.loads((folder / _CHECKSUMS).read_text(encoding="utf-8"))
        damaged = [name for name in (_TENSORS, _STATE) if sums.get(name) != _checksum(folder / name)]
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"The checksums of {str(folder)!r} cannot be read: {error}.") from error
    if damaged:
        raise CheckpointError(
            f"The checkpoint {str(folder)!r} is damaged: {' and '.join(damaged)} changed since it was written. Resume "
            "from another."
        )


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _put_in_place(aside: Path, folder: Path) -> None:
    """Renames; what had the name before goes last."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(aside, folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


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


class _Tensors:
    """The tensors of a state by their path; one that is there twice (tied weights) is kept once."""

    def __init__(self) -> None:
        self.by_path: dict[str, torch.Tensor] = {}
        self._paths: dict[tuple[Any, ...], str] = {}
        self._storages: set[int] = set()

    def keep(self, tensor: torch.Tensor, path: str) -> str:
        """Keeps a tensor, and returns the path it is found under."""
        tensor = tensor.detach()
        same = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and same in self._paths:
            return self._paths[same]
        kept = tensor.contiguous()
        storage = kept.untyped_storage()
        if storage.nbytes() != kept.nbytes or storage.data_ptr() in self._storages:
            kept = kept.clone()  # a view, or a part of what is kept already: safetensors takes storages of their own
        self._storages.add(storage.data_ptr())
        self.by_path[path] = kept
        self._paths[same] = path
        return path


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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
