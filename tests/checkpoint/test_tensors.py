"""The safetensors file: read back by the library itself, with the checksum it has, in the memory of one bucket."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import paraflow as pf
from paraflow.checkpoint.tensors import _NAMES, size_of, write_tensors


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def numbers(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """All kinds of bit patterns of a dtype."""
    count = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return ((raw & 1) == 1).view(shape) if dtype == torch.bool else raw.view(dtype).view(shape)


@pytest.mark.parametrize("dtype", _NAMES, ids=str)
def test_every_dtype_is_read_back_by_the_library(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "matrix": numbers(dtype, (5, 7)),
        "scalar": numbers(dtype, (1,)).view(()),
        "nothing": torch.empty(0, dtype=dtype),
        "no rows": torch.empty(0, 3, dtype=dtype),
        "turned": numbers(dtype, (4, 6)).t(),
        "every other": numbers(dtype, (9, 4))[::2, 1:3],
        "spread": numbers(dtype, (1, 3)).expand(4, 3),
    }
    write_tensors(tmp_path / "file", tensors)
    back = load_file(tmp_path / "file")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (back[name].dtype, back[name].shape) == (dtype, tensor.shape)
        assert bits(back[name]) == bits(tensor), name


def test_dtypes_of_all_widths_in_one_file(tmp_path: Path) -> None:
    tensors = {str(dtype): numbers(dtype, (3,)) for dtype in _NAMES}
    tensors |= {"bias": torch.ones(3, requires_grad=True), "ein Häuschen/☃": torch.zeros(2), "": torch.ones(1)}
    write_tensors(tmp_path / "file", tensors)
    back = load_file(tmp_path / "file")
    assert {name: bits(tensor) for name, tensor in back.items()} == {
        name: bits(tensor.detach()) for name, tensor in tensors.items()
    }
    content = (tmp_path / "file").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    for name, entry in header.items():
        assert entry["data_offsets"][0] % tensors[name].element_size() == 0, f"{name} is not aligned"


@pytest.mark.parametrize("tensors", [{}, {"a": torch.arange(1000.0)}, {"a": torch.ones(3, 4).t(), "b": torch.ones(())}])
def test_the_checksum_is_that_of_the_file(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    told = write_tensors(tmp_path / "file", tensors)
    content = (tmp_path / "file").read_bytes()
    assert told == hashlib.sha256(content).hexdigest()
    header = 8 + int.from_bytes(content[:8], "little")
    assert header % 8 == 0
    assert len(content) == header + size_of(tensors)


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2, dtype=torch.complex128), torch.ones(3).to_sparse()],
    ids=["complex128", "sparse"],
)
def test_what_the_format_does_not_hold_is_named(tmp_path: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(pf.CheckpointError, match=r"The state at 'model/odd' is a tensor of torch\..*does not hold"):
        write_tensors(tmp_path / "file", {"model/odd": tensor, "fine": torch.ones(1)})


MEMORY = """
import sys, torch
from pathlib import Path
from paraflow.checkpoint.image import take_apart
from paraflow.checkpoint.writer import Writer

def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

writer, kind, mib = Writer(), sys.argv[2], 2**18
writer.save(Path(sys.argv[1]) / "first", take_apart({"small": torch.ones(3)}))  # what is imported and made once
assert writer.settle() is None
state = {"a": torch.ones(128 * mib), "b": torch.ones(160 * mib), "c": torch.ones(96, mib), "d": torch.ones(())}
if kind == "turned":
    state["c"] = state["c"].t()
before = peak()
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
now = peak()
writer.save(Path(sys.argv[1]) / "second", take_apart(state))
assert writer.settle() is None
print(peak() - now)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells a process its peak memory")
@pytest.mark.parametrize(("kind", "most"), [("plain", 0), ("turned", 64)])
def test_a_save_takes_the_memory_of_a_bucket_at_most(tmp_path: Path, kind: str, most: int) -> None:
    """A state of 384 MiB: none of it is copied, apart from a tensor that lies otherwise than in the file."""
    code = [sys.executable, "-c", MEMORY, str(tmp_path), kind]
    result = subprocess.run(code, capture_output=True, text=True, timeout=120, check=True)
    extra: Any = int(result.stdout) / 2**20
    assert most <= extra + 1
    assert extra <= most + 8
    assert (tmp_path / "second" / "tensors-00000.safetensors").stat().st_size > 384 * 2**20
