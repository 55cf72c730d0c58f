"""The checkpoint on disk: what goes in comes out, damage is found, and what was there before stays."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import paraflow as pf
from paraflow.checkpoint.format import write as write_image
from paraflow.checkpoint.image import take_apart
from paraflow.checkpoint.reading import read

STATE: dict[str, Any] = {
    "model": {"weight": torch.arange(6.0).view(2, 3), "half": torch.ones(2, dtype=torch.bfloat16)},
    "optimizer": {"betas": (0.9, 0.999), "groups": [{"params": ["weight"], "lr": 0.1, "fused": None}], "empty": {}},
    "counters": {"step": 7, "done": True, "best": math.inf},
    "name": "ein Häuschen",
    "milestones": {3: 1, 10: 2},
}


def write(folder: Path, state: dict[str, Any]) -> None:
    write_image(folder, take_apart(state))


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    write(tmp_path / "a", STATE)
    back = read(tmp_path / "a")
    assert back["optimizer"] == STATE["optimizer"]
    assert isinstance(back["optimizer"]["betas"], tuple)
    assert back["counters"] == STATE["counters"]
    assert back["name"] == STATE["name"]
    assert back["milestones"] == STATE["milestones"]
    for name, tensor in STATE["model"].items():
        assert torch.equal(back["model"][name], tensor)
        assert back["model"][name].dtype == tensor.dtype


def test_views_and_tied_tensors(tmp_path: Path) -> None:
    table = torch.randn(4, 3)
    write(tmp_path / "a", {"one": table, "two": table, "row": table[1], "turned": table.t(), "scalar": torch.tensor(3)})
    back = read(tmp_path / "a")
    assert torch.equal(back["two"], table)
    assert torch.equal(back["row"], table[1])
    assert torch.equal(back["turned"], table.t())
    assert back["scalar"].item() == 3
    assert (tmp_path / "a" / "tensors-00000.safetensors").stat().st_size < 3 * table.nbytes + 600


@pytest.mark.parametrize("name", ["tensors-00000.safetensors", "state.json", "checksums.json"])
def test_any_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a", STATE)
    path = tmp_path / "a" / name
    whole = path.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 23)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place % 8)
        path.write_bytes(bytes(damaged))
        with pytest.raises(pf.CheckpointError, match=r"damaged|checksums"):
            read(tmp_path / "a")
    path.write_bytes(whole)
    read(tmp_path / "a")


@pytest.mark.parametrize("name", ["tensors-00000.safetensors", "state.json", "checksums.json"])
def test_truncated_or_missing_files_are_found(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a", STATE)
    path = tmp_path / "a" / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(pf.CheckpointError):
        read(tmp_path / "a")
    path.unlink()
    with pytest.raises(pf.CheckpointError, match=f"no whole checkpoint: it has no {name}"):
        read(tmp_path / "a")


def test_a_new_one_takes_the_place_of_an_old_one_of_its_name(tmp_path: Path) -> None:
    write(tmp_path / "a", {"step": 1})
    write(tmp_path / "a", {"step": 2})
    assert read(tmp_path / "a") == {"step": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("value", [object(), {1: 2, "a": 3}, {"__tensor__": "x"}, {"f": print}])
def test_what_cannot_be_saved_is_named_and_leaves_nothing(tmp_path: Path, value: Any) -> None:
    write(tmp_path / "a", STATE)
    with pytest.raises(pf.CheckpointError, match="state"):
        write(tmp_path / "a", {"callbacks": {"mine": value}})
    assert read(tmp_path / "a")["counters"]["step"] == 7
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_full_or_forbidden_place_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(pf.CheckpointError, match="could not be written"):
        write(tmp_path / "file" / "a", STATE)
