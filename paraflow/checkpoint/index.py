"""Where each tensor of a checkpoint lies: what the files say themselves, and the index of all of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from paraflow.checkpoint.image import Image
from paraflow.checkpoint.stored import pieces_of
from paraflow.checkpoint.tensors import name_of, read_header
from paraflow.errors import CheckpointError

_METADATA = "__metadata__"


def metadata_of(image: Image, identity: str) -> dict[str, str]:
    """Returns what a rank's file says of itself: the save it belongs to, and where its parts lie.

    Args:
        image: The state; of its parts those that are written.
        identity: The save.
    """
    pieces = {name: place for name, place in image.places.items() if place.writes and name in image.tensors}
    said = {
        "offsets": {name: place.offset for name, place in pieces.items()},
        "paths": {name: place.path for name, place in pieces.items() if name != place.path},
        "aliases": dict(image.aliases),
    }
    parts = json.dumps(said) if pieces or image.mine is not None else ""
    return {"save": identity, **({"parts": parts} if parts else {})}


def save_of(path: Path) -> str | None:
    """Returns which save a file of tensors says it belongs to, or None where it says nothing that can be read."""
    with contextlib.suppress(OSError, LookupError, ValueError, AttributeError, RecursionError):
        said: str | None = read_header(path)[_METADATA].get("save")
        return said
    return None


def index_of(image: Image, files: Sequence[Path]) -> dict[str, Any]:
    """Returns where the tensors of an image lie, by path: ``dtype``, ``shape`` and ``pieces``.

    Args:
        image: Rank 0's.
        files: What the ranks have written, rank 0's first.

    Raises:
        CheckpointError: A tensor was not written whole.
    """
    index: dict[str, Any] = {
        path: {"dtype": name_of(whole.dtype), "shape": whole.shape, "pieces": []}
        for path, whole in image.wholes().items()
    }
    for file in files:
        for path, piece in _pieces_in(file, index):
            index[path]["pieces"].append(piece)
    for path, entry in index.items():
        if sum(prod(piece["shape"]) for piece in entry["pieces"]) != prod(entry["shape"]):
            raise CheckpointError(
                f"The state at {path!r} was not written whole: no rank holds some part of it, or two hold the same. A "
                "tensor that is spread over ranks must be sharded or replicated, not a partial sum."
            )
    return index


def _pieces_in(file: Path, index: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The pieces in a file, each with the path that it belongs to."""
    header = read_header(file)
    parts = {"offsets": {}, "paths": {}, "aliases": {}, **json.loads(header.pop(_METADATA).get("parts", "{}"))}
    pieces: dict[str, list[dict[str, Any]]] = {}
    for name, entry in header.items():
        offset = parts["offsets"].get(name, [0] * len(entry["shape"]))
        piece = {"file": file.name, "name": name, "offset": offset, "shape": entry["shape"]}
        pieces.setdefault(parts["paths"].get(name, name), []).append(piece)
    known = [*((path, path) for path in pieces), *parts["aliases"].items()]
    return [(path, piece) for path, first in known if path in index for piece in pieces.get(first, ())]


def disagreement(file: Path, index: Mapping[str, Any]) -> str:
    """Returns what a file holds otherwise than an index says, or nothing.

    Raises:
        OSError: The file cannot be read.
        LookupError, TypeError, ValueError, AttributeError: The file or the index is not of its form.
    """
    header = read_header(file)
    for path, entry in index.items():
        for piece in pieces_of(path, entry):
            if piece.file != file.name:
                continue
            there = header[piece.name]
            if there["dtype"] != entry["dtype"] or tuple(there["shape"]) != piece.shape:
                return f"{piece.name!r} in {file.name} is of {there['dtype']} and shape {there['shape']}"
    return ""
