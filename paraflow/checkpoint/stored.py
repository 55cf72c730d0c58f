"""Tensors of a checkpoint that are still on disk: what is asked for is read, and no more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from paraflow.checkpoint.tensors import dtype_of
from paraflow.errors import CheckpointError
from paraflow.parts import Box, map_values


class Files:
    """The safetensors files of one checkpoint, open: what is removed from the disk later can still be read.

    Args:
        folder: The checkpoint.
        names: The files in it.

    Raises:
        OSError, safetensors.SafetensorError: One cannot be opened.
    """

    def __init__(self, folder: Path, names: list[str]) -> None:
        from safetensors import safe_open

        self._folder = folder
        self._open: dict[str, Any] = {name: safe_open(folder / name, framework="pt") for name in names}

    def read(self, file: str, name: str, box: Box) -> torch.Tensor:
        """Returns a box of a tensor of a file.

        Raises:
            CheckpointError: It cannot be read.
        """
        from safetensors import SafetensorError

        try:
            found: torch.Tensor = self._open[file].get_slice(name)[box or ...]
        except (OSError, SafetensorError, LookupError) as error:
            raise CheckpointError(f"{str(self._folder / file)!r} cannot be read at {name!r}: {error}.") from error
        return found


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, as it lies in a file.

    Attributes:
        file: The file's name.
        name: The tensor's name in it.
        offset: Where the box begins in the whole, along each dimension.
        shape: The shape of the box.
    """

    file: str
    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, shape: tuple[int, ...]) -> bool:
        """Whether the box lies within a tensor of a shape."""
        edges = zip(self.offset, self.shape, shape, strict=True)
        return all(start >= 0 and size >= 0 and start + size <= whole for start, size, whole in edges)


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor on disk: ``stored[box]`` reads a box of it, from the pieces it lies in, and ``stored[...]`` all of it.

    Attributes:
        shape: The shape of the whole.
        dtype: Its dtype.
        pieces: Where it lies; together they are the whole.
        files: The files they are in.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    files: Files

    @property
    def nbytes(self) -> int:
        """The bytes of the whole."""
        return prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, box: Any) -> torch.Tensor:
        """Reads a box: slices without steps, one for each of the first dimensions; the rest is taken whole."""
        given = () if box is ... else box if isinstance(box, tuple) else (box,)
        sizes = self.shape
        ranges = [part.indices(size)[:2] for part, size in zip(given, sizes, strict=False)]
        ranges += [(0, size) for size in sizes[len(given) :]]
        out = torch.empty([max(0, stop - start) for start, stop in ranges], dtype=self.dtype)
        for piece in self.pieces:
            self._copy(piece, ranges, out)
        return out

    def _copy(self, piece: Piece, ranges: list[tuple[int, int]], out: torch.Tensor) -> None:
        """Copies what a piece has of a box."""
        there, here = [], []
        for (start, stop), offset, size in zip(ranges, piece.offset, piece.shape, strict=True):
            first, last = max(start, offset), min(stop, offset + size)
            if first >= last:
                return
            there.append(slice(first - offset, last - offset))
            here.append(slice(first - start, last - start))
        out[tuple(here)].copy_(self.files.read(piece.file, piece.name, tuple(there)))

    def rows(self, most: int) -> Iterator[torch.Tensor]:
        """Reads the whole, some rows at a time: as many as fit in so many bytes, and at least one."""
        if not self.shape or self.nbytes <= most:
            yield self[...]
            return
        count = max(1, most * self.shape[0] // self.nbytes)
        for start in range(0, self.shape[0], count):
            yield self[start : start + count]

    def __deepcopy__(self, memo: dict[int, Any]) -> Stored:
        return self


def stored_in(folder: Path, index: Mapping[str, Any]) -> dict[str, Stored]:
    """Returns the tensors of a checkpoint by path.

    Args:
        folder: The checkpoint.
        index: By path: ``dtype``, ``shape`` and ``pieces``, each with ``file``, ``name``, ``offset`` and ``shape``.

    Raises:
        LookupError, TypeError, ValueError: The index is not of its form.
        OSError, safetensors.SafetensorError: A file cannot be opened.
    """
    entries = {path: pieces_of(path, entry) for path, entry in index.items()}
    files = Files(folder, sorted({piece.file for pieces in entries.values() for piece in pieces}))
    return {
        path: Stored(tuple(index[path]["shape"]), dtype_of(index[path]["dtype"]), pieces, files)
        for path, pieces in entries.items()
    }


def pieces_of(path: str, entry: Mapping[str, Any]) -> tuple[Piece, ...]:
    """Returns the pieces of an entry of an index.

    Raises:
        LookupError, TypeError, ValueError: It is not of its form, or the pieces are not the whole.
    """
    shape = tuple(entry["shape"])
    pieces = tuple(
        Piece(Path(part["file"]).name, part["name"], tuple(part["offset"]), tuple(part["shape"]))
        for part in entry["pieces"]
    )
    if not all(piece.of(shape) for piece in pieces) or sum(prod(piece.shape) for piece in pieces) != prod(shape):
        raise ValueError(f"the pieces of {path!r} are not the whole")
    return pieces


def in_memory(state: Any) -> Any:
    """Returns a state with every tensor of it that is on disk read."""
    return map_values(state, lambda value: value[...] if isinstance(value, Stored) else value)
