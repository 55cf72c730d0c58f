"""Writes a safetensors file tensor by tensor: no more than one bucket of bytes is ever copied.

The library's own writer first turns every tensor into bytes, which is a second copy of all of them. The format
(https://github.com/huggingface/safetensors#format): the length of the header as 8 bytes, little-endian; the header in
JSON, padded with spaces to a multiple of 8; then the tensors' bytes without holes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from paraflow.errors import CheckpointError

BUCKET = 64 * 2**20
"""The most bytes that are copied at once: from a device, or where a tensor lies otherwise than in the file."""

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def name_of(dtype: torch.dtype) -> str:
    """Returns what the format calls a dtype that it holds."""
    return _NAMES[dtype]


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype that the format calls so.

    Raises:
        KeyError: There is none.
    """
    return _DTYPES[name]


def size_of(tensors: Mapping[str, Any]) -> int:
    """Returns the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors.values())


def write_tensors(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> str:
    """Writes tensors, by name, to a new file.

    Args:
        path: The file.
        tensors: In memory, or on disk (`paraflow.checkpoint.stored.Stored`).
        metadata: Texts by name, kept in the header.

    Returns:
        The SHA-256 of the file as it was meant to be written, in hexadecimal.

    Raises:
        CheckpointError: A tensor is of a kind the format does not hold.
        OSError: The disk refuses it.
    """
    # Wide types first, so that every tensor lies at a multiple of its own width.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        for view in _parts(names, tensors, metadata):
            digest.update(view)
            written = 0
            while written < len(view):  # one call writes 2 GiB at most
                written += file.write(view[written:])
    return digest.hexdigest()


def read_header(path: Path) -> dict[str, Any]:
    """Returns the header of a file: dtype, shape and place of each tensor by name, and ``__metadata__``.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no such file.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path.name} is no safetensors file")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"{path.name} has no header of a safetensors file")
    return header


def _parts(names: list[str], tensors: Mapping[str, Any], metadata: Mapping[str, str] | None) -> Iterator[memoryview]:
    """What the file is made of, one after another."""
    yield memoryview(_header(names, tensors, metadata))
    bucket: torch.Tensor | None = None
    for name in names:
        for piece in _pieces(tensors[name]):
            if piece.device.type == "cpu" and piece.is_contiguous():
                yield _bytes_of(piece)
                continue
            if bucket is None:
                bucket = torch.empty(BUCKET, dtype=torch.uint8)
            yield _bytes_of(bucket[: piece.nbytes].view(piece.dtype).view(piece.shape).copy_(piece.detach()))


def _bytes_of(dense: torch.Tensor) -> memoryview:
    return dense.detach().view(-1).view(torch.uint8).numpy().data


def _header(names: list[str], tensors: Mapping[str, Any], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES or getattr(tensor, "layout", torch.strided) != torch.strided:
            raise CheckpointError(
                f"The state at {name!r} is a tensor of {tensor.dtype} and layout {tensor.layout}, which safetensors "
                "does not hold. Keep it as dense numbers in state_dict."
            )
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.nbytes],
        }
        start += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _pieces(tensor: Any) -> Iterator[torch.Tensor]:
    """A tensor in row-major order: whole where its own bytes can be written, else in pieces of a bucket at most."""
    if not isinstance(tensor, torch.Tensor):
        yield from tensor.rows(BUCKET // 2)  # while one is written the next is read
    elif tensor.is_contiguous():
        whole = tensor.device.type == "cpu"
        yield from (tensor,) if whole else torch.split(tensor.view(-1), max(1, BUCKET // tensor.element_size()))
    elif tensor.nbytes <= BUCKET:
        yield tensor
    else:
        row = tensor.nbytes // len(tensor)
        parts = tensor.unbind() if row > BUCKET else torch.split(tensor, BUCKET // row)
        for part in parts:
            yield from _pieces(part)
