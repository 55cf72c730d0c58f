"""Weights in safetensors files, a transformers folder for one, of which only the wanted boxes are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from paraflow.errors import CheckpointError
from paraflow.parts import Sliceable

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def has_weights(path: str | Path) -> bool:
    """Whether a path is a safetensors file, or a folder with one as transformers writes it."""
    path = Path(path)
    if path.is_file():
        return path.suffix == ".safetensors"
    return (path / _FILE).is_file() or (path / _INDEX).is_file()


def open_weights(path: str | Path) -> Mapping[str, Sliceable]:
    """Opens weights without reading them: ``weights[name][box]`` reads a box, ``weights[name][...]`` all of it.

    Args:
        path: A ``.safetensors`` file, or a folder with ``model.safetensors`` or ``model.safetensors.index.json``.

    Returns:
        The weights by name. They have ``.shape``; what is read is a tensor on the host that lies in
        the mapped file: copy it to keep it.

    Raises:
        CheckpointError: There are none, or a file of them is missing or damaged.
    """
    path = Path(path)
    if path.is_file():
        return _weights_in([path])
    index = path / _INDEX
    if index.is_file():
        return _indexed(index)
    if (path / _FILE).is_file():
        return _weights_in([path / _FILE])
    what = "has no model.safetensors and no index of parts of one" if path.is_dir() else "does not exist"
    raise CheckpointError(f"{str(path)!r} {what}; give a .safetensors file, or a folder as transformers saves it.")


class _Weight:
    """A tensor in a safetensors file. What is read shares memory with the file until it is copied."""

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name
        self.shape = tuple(file.get_slice(name).get_shape())

    def __getitem__(self, box: Any) -> torch.Tensor:
        if box is Ellipsis or box == ():
            whole: torch.Tensor = self._file.get_tensor(self._name)
            return whole
        part: torch.Tensor = self._file.get_slice(self._name)[box]
        return part


def _indexed(index: Path) -> dict[str, Sliceable]:
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(places.values()))
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{str(index)!r} is no index of safetensors files: {error}.") from error
    weights = _weights_in([index.parent / name for name in files])
    lacking = sorted(places.keys() - weights.keys())
    if lacking:
        raise CheckpointError(f"The files that {str(index)!r} names lack {len(lacking)} of its weights: {lacking[0]}.")
    return weights


def _weights_in(files: list[Path]) -> dict[str, Sliceable]:
    weights: dict[str, Sliceable] = {}
    for path in files:
        try:
            file: Any = safe_open(path, framework="pt", device="cpu")
            weights.update({name: _Weight(file, name) for name in list(file.keys())})
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"The weights in {str(path)!r} cannot be read: {error}.") from error
    return weights
