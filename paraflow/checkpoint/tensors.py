"""Writes a safetensors file tensor by tensor: no more than one tensor is ever copied.

The library's own writer first turns every tensor into bytes, which is a second copy of all of them. The format
(https://github.com/huggingface/safetensors#format): the length of the header as 8 bytes, little-endian; the header in
JSON, padded with spaces to a multiple of 8; then the tensors' bytes without holes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from paraflow.errors import CheckpointError

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


def size_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Returns the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors.values())


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Writes tensors, by name, to a new file.

    Returns:
        The SHA-256 of the file as it was meant to be written, in hexadecimal.

    Raises:
        CheckpointError: A tensor is of a kind the format does not hold.
        OSError: The disk refuses it.
    """
    # Wide types first, so that every tensor lies at a multiple of its own width.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        for view in _parts(names, tensors):
            digest.update(view)
            written = 0
            while written < len(view):  # one call writes 2 GiB at most
                written += file.write(view[written:])
    return digest.hexdigest()


def _parts(names: list[str], tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    """What the file is made of, one after another."""
    yield memoryview(_header(names, tensors))
    for name in names:
        yield _bytes_of(tensors[name])


def _header(names: list[str], tensors: Mapping[str, torch.Tensor]) -> bytes:
    entries, start = {}, 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES or tensor.layout != torch.strided:
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


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in row-major order: its own where they lie so on the host, else a copy of this one."""
    dense = tensor.detach().cpu().contiguous().reshape(-1)
    return dense.view(torch.uint8).numpy().data
