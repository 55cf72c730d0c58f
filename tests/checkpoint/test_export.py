"""Weights of a checkpoint for others: what they load is what was saved, and what is there is whole."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn
from typer.testing import CliRunner

import paraflow as pf
from paraflow.checkpoint import export
from paraflow.checkpoint.format import write
from paraflow.checkpoint.image import take_apart
from paraflow.checkpoint.pretrained import open_weights
from paraflow.cli import main
from paraflow.parts import whole
from tests.models.test_transformers import build, rows

KINDS = {"gpt2": "AutoModelForCausalLM", "bert": "AutoModelForMaskedLM", "llama": "AutoModelForCausalLM"}


def model_of(kind: str) -> nn.Module:
    """A small transformers model: BERT and GPT-2 tie their embeddings, this Llama does not."""
    return pf.configure(build(kind), optimizer="sgd", lr=0.5)


def train(home: str) -> dict[str, dict[str, torch.Tensor]]:
    """Trains each kind under fsdp 2 and saves it; returns the weights by kind, whole."""
    weights = {}
    for kind in KINDS:
        callbacks = [pf.callbacks.Checkpoint(f"{home}/{kind}"), pf.callbacks.EMA(0.5)]
        trainer = pf.Trainer(max_steps=2, fsdp=2, progress=False, callbacks=callbacks)
        trainer.fit(model_of(kind), rows(), batch_size=4)
        state = trainer.engine.model_state()
        weights[kind] = {name: whole(tensor).detach().clone() for name, tensor in state.items()}
    return weights


@pytest.fixture(scope="module")
def trained(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, torch.Tensor]]]:
    home = tmp_path_factory.mktemp("trained")
    return home, ranks(2, train, str(home))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_takes_a_checkpoint_of_shards(trained: Any, tmp_path: Path, kind: str) -> None:
    import transformers

    home, weights = trained
    done = export(home / kind, tmp_path / "out", max_shard="4KB")
    model, report = getattr(transformers, KINDS[kind]).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    assert all(torch.equal(value, weights[kind][name]) for name, value in model.state_dict().items())
    model.save_pretrained(tmp_path / "theirs")
    theirs, mine = (json.loads((tmp_path / place / "config.json").read_text()) for place in ("theirs", "out"))
    assert theirs.items() <= mine.items()
    assert (tmp_path / "out" / "generation_config.json").exists() == model.can_generate()
    # The names are those that transformers writes: a tied weight is there once.
    assert open_weights(tmp_path / "out").keys() == open_weights(tmp_path / "theirs").keys()
    shards = [file for file in done.files if file.suffix == ".safetensors"]
    assert [file.name for file in shards] == [
        f"model-{place:05d}-of-{len(shards):05d}.safetensors" for place in range(1, len(shards) + 1)
    ]
    assert len(shards) > 3
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    tensors = {file.name: load_file(file) for file in shards}
    sizes = {name: sum(tensor.nbytes for tensor in inside.values()) for name, inside in tensors.items()}
    assert index["metadata"]["total_size"] == sum(sizes.values()) == done.bytes
    assert all(size <= 4000 or len(tensors[name]) == 1 for name, size in sizes.items())
    assert index["weight_map"] == {weight: name for name, inside in tensors.items() for weight in inside}


@pytest.mark.parametrize("kind", KINDS)
def test_one_file_is_taken_by_safetensors_and_by_paraflow(trained: Any, tmp_path: Path, kind: str) -> None:
    home, weights = trained
    export(home / kind, tmp_path / "one.safetensors")
    with safe_open(tmp_path / "one.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
    for load in (load_model, pf.checkpoint.load_model):
        model = build(kind)
        load(model, tmp_path / "one.safetensors")
        assert all(torch.equal(value, weights[kind][name]) for name, value in model.state_dict().items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.safetensors"]


def test_averages_in_half_precision(trained: Any, tmp_path: Path) -> None:
    import transformers

    home, weights = trained
    result = CliRunner().invoke(
        main, ["export", str(home / "gpt2"), str(tmp_path / "out"), "--averages", "--dtype", "bf16"]
    )
    assert result.exit_code == 0, result.stderr
    averaged = build("gpt2")
    pf.callbacks.EMA.load(averaged, home / "gpt2")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    state = averaged.state_dict()
    assert not torch.equal(state["lm_head.weight"], weights["gpt2"]["lm_head.weight"])
    assert all(torch.equal(value, state[name].bfloat16()) for name, value in model.state_dict().items())


class Odd(nn.Module):
    """Tensors of many dtypes, one of them empty, and a tie that a config says transformers would not make."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("wide", torch.tensor([1e30], dtype=torch.float64))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))


def saved(folder: Path, **state: Any) -> Path:
    write(folder, take_apart({"model": dict(Odd().state_dict()), **state}))
    return folder


def test_integers_stay_and_what_does_not_fit_is_refused_whole(tmp_path: Path) -> None:
    folder, out = saved(tmp_path / "step-00000001"), tmp_path / "out"
    sentence = r"'wide' has numbers up to 1e\+30, and torch.float16 holds 6.55e\+04 at most. Export in 'bf16'"
    with pytest.raises(pf.CheckpointError, match=sentence):
        export(folder, out, dtype="fp16", max_shard=8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]
    export(folder, out, dtype="bf16")
    tensors = load_file(out / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        **dict.fromkeys(["first.weight", "none", "nothing", "wide", "mask"], torch.bfloat16),
        "count": torch.int64,
    }
    assert tensors["mask"][1] == -torch.inf
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "second.weight": "first.weight"}


def test_ties_that_transformers_would_not_make_are_written_twice(tmp_path: Path) -> None:
    about = {"model_class": "Odd", "config": {"model_type": "odd", "tie_word_embeddings": False}}
    export(saved(tmp_path / "a", about=about), tmp_path / "out")
    assert {"first.weight", "second.weight"} <= load_file(tmp_path / "out" / "model.safetensors").keys()


def test_what_is_there_stays_unless_it_may_be_replaced(tmp_path: Path) -> None:
    folder, out = saved(tmp_path / "step-00000001"), tmp_path / "out"
    out.mkdir()
    export(folder, out, max_shard="40b")  # an empty folder is as good as none
    (out / "tokenizer.json").write_text("mine")
    shards = {path.name for path in out.glob("model-*")}
    with pytest.raises(pf.CheckpointError, match=r"is not empty; write force=True \(--force\) to replace"):
        export(folder, out)
    assert {path.name for path in out.glob("model-*")} == shards
    export(folder, out, force=True)
    assert sorted(path.name for path in out.iterdir()) == ["model.safetensors", "tokenizer.json"]
    assert (out / "tokenizer.json").read_text() == "mine"
    export(folder, out, force=True, max_shard=40)
    assert {path.name for path in out.iterdir()} == {*shards, "model.safetensors.index.json", "tokenizer.json"}
    one = tmp_path / "one.safetensors"
    export(folder, one)
    with pytest.raises(pf.CheckpointError, match=r"exists; write force=True"):
        export(folder, one)
    export(folder, one, force=True)


def test_refusals_are_sentences(tmp_path: Path) -> None:
    home = tmp_path / "run"
    folder = saved(home / "step-00000001", callbacks={"EMA-1": {"averages": {}}})
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.safetensors").mkdir()
    for out, options, sentence in [
        ("out", {"averages": True}, "has no averages: it was saved without EMA"),
        ("out", {"dtype": "int8"}, "dtype must be one of 'fp32', 'bf16', 'fp16', not 'int8'"),
        ("out", {"max_shard": "many"}, "max_shard must be a number of bytes or a size"),
        ("one.safetensors", {"max_shard": "1GB"}, "max_shard is for a folder"),
        ("file", {"force": True}, r"is a file, and weights are to be a folder; .* ends in .safetensors"),
        ("file/out", {}, r"file/out' could not be written: (Not a directory|File exists)"),
        ("folder.safetensors", {"force": True}, "is a folder, and weights are to be a file"),
        ("run", {"force": True}, "holds checkpoints; export to a folder of its own"),
        ("run/step-00000001", {"force": True}, "holds checkpoints"),
    ]:
        with pytest.raises(pf.errors.ParaflowError, match=sentence):
            export(home, tmp_path / out, **options)
    tensors = next(folder.glob("tensors-*"))
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"?")
    result = CliRunner().invoke(main, ["export", str(home), str(tmp_path / "out")])
    assert result.exit_code == 1
    assert result.stderr.startswith("paraflow export: The checkpoint ")
    assert "is damaged: tensors-00000.safetensors changed" in result.stderr
    tensors.unlink()
    with pytest.raises(pf.CheckpointError, match=r"no whole checkpoint: it has no tensors-00000\.safetensors"):
        export(home, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.safetensors", "run"]


def test_several_averages_are_told_apart(tmp_path: Path) -> None:
    averages = {"first.weight": torch.ones(3, 3), "second.weight": torch.ones(3, 3)}
    kept = {"EMA-1": {"averages": averages}, "StochasticWeightAveraging-1": {"averages": averages}}
    folder = saved(tmp_path / "a", callbacks=kept)
    with pytest.raises(pf.CheckpointError, match=r"of EMA-1 and StochasticWeightAveraging-1\. Name one of them"):
        export(folder, tmp_path / "out", averages=True)
    with pytest.raises(pf.CheckpointError, match="no averages of 'Other': it has those of EMA-1 and"):
        export(folder, tmp_path / "out", averages="Other")
    export(folder, tmp_path / "out", averages="EMA")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["first.weight"], torch.ones(3, 3))
    assert "second.weight" not in tensors


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_a_disk_without_room_is_said_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001"
    write(folder, take_apart({"model": {"weight": torch.zeros(2**20)}}))
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=True)
    try:
        with pytest.raises(pf.CheckpointError, match=r"take 5.0 MiB, and .*disk' has 2.0 MiB left"):
            export(folder, disk / "out")
        assert not list(disk.iterdir())
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
