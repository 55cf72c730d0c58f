"""Weights in safetensors files are read a box at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import paraflow as pf
from paraflow.births import births_of, give_weights
from paraflow.checkpoint.pretrained import has_weights, open_weights
from paraflow.placing import place

HOST = torch.device("cpu")
TABLE = torch.arange(12.0).view(3, 4)


def test_boxes_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file({"table": TABLE, "number": torch.tensor(3.0), "none": torch.empty(0, 4)}, file)
    weights = open_weights(file)
    assert has_weights(file)
    assert tuple(weights["table"].shape) == (3, 4)
    assert torch.equal(weights["table"][1:3, 0:2], TABLE[1:3, 0:2])
    assert torch.equal(weights["table"][...], TABLE)
    assert weights["table"][3:3, 0:4].shape == (0, 4)
    assert weights["none"][0:0, 0:4].shape == (0, 4)
    assert weights["number"][()] == weights["number"][...] == 3


def test_folders_with_and_without_an_index(tmp_path: Path) -> None:
    save_file({"a": TABLE}, tmp_path / "one.safetensors")
    save_file({"b": TABLE + 1}, tmp_path / "two.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    assert has_weights(tmp_path)
    assert torch.equal(open_weights(tmp_path)["b"][0:1, 0:4], TABLE[:1] + 1)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(pf.CheckpointError, match=r"two.safetensors' cannot be read"):
        open_weights(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "c": "one.safetensors"}}))
    with pytest.raises(pf.CheckpointError, match="lack 1 of its weights: c"):
        open_weights(tmp_path)
    index.write_text("{}")
    with pytest.raises(pf.CheckpointError, match="is no index"):
        open_weights(tmp_path)
    (tmp_path / "one.safetensors").rename(tmp_path / "model.safetensors")
    index.unlink()
    assert list(open_weights(tmp_path)) == ["a"]


def test_what_is_no_weights_is_said(tmp_path: Path) -> None:
    assert not has_weights(tmp_path)
    with pytest.raises(pf.CheckpointError, match=r"has no model\.safetensors"):
        open_weights(tmp_path)
    with pytest.raises(pf.CheckpointError, match="does not exist"):
        open_weights(tmp_path / "away")
    (tmp_path / "broken.safetensors").write_bytes(b"12")
    with pytest.raises(pf.CheckpointError, match="cannot be read"):
        open_weights(tmp_path / "broken.safetensors")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.body = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 100, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.linspace(0, 1, 64), persistent=False)


@pytest.mark.parametrize("left_out", ["head.weight", "embedding.weight"])
def test_a_module_takes_its_weights_now_or_when_it_gets_memory(tmp_path: Path, left_out: str) -> None:
    source = Tied()
    saved = {name: tensor.double() for name, tensor in source.state_dict().items() if name != left_out}
    saved["body.num_batches_tracked"] = torch.tensor(7)
    save_file(saved, tmp_path / "model.safetensors")
    now = Tied()
    give_weights(now, open_weights(tmp_path))
    with pf.deferred_init():
        later = Tied()
    give_weights(later, open_weights(tmp_path))
    place(later, births_of(later), HOST)
    for module in (now, later):
        assert module.head.weight is module.embedding.weight
        assert torch.equal(module.head.weight, source.head.weight)
        assert module.body.num_batches_tracked == 7
        assert torch.equal(module.positions, source.positions)
    save_file({name: tensor * 0 for name, tensor in saved.items()}, tmp_path / "model.safetensors")
    assert torch.equal(later.head.weight, source.head.weight), "the weights lie in the file"


def test_weights_of_another_model_are_refused() -> None:
    weights = {"weight": torch.zeros(3, 5), "scale": torch.zeros(1)}
    with pytest.raises(pf.CheckpointError, match="they lack bias; they have scale, which it has not; of another shape"):
        give_weights(nn.Linear(4, 3), weights)


def test_a_folder_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=200, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    source = transformers.GPT2LMHeadModel(config)
    source.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    with pf.deferred_init():
        module = transformers.GPT2LMHeadModel(config)
    give_weights(module, open_weights(tmp_path))
    place(module, births_of(module), HOST)
    assert module.lm_head.weight is module.transformer.wte.weight
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in source.state_dict().items())
