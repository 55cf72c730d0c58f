"""What is in a checkpoint is said without loading it, also of one that is not whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import paraflow as pf
from paraflow.cli import main

X = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
Y = X[:, :3].argmax(1)


def train(home: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    model[1].weight = model[0].weight
    pf.configure(model, lr=0.05, loss="cross_entropy")
    saving = pf.callbacks.Checkpoint(home, monitor="val_loss", mode="max", keep=2)
    trainer = pf.Trainer(max_epochs=3, fsdp=2, clip_norm=1.0, progress=False, callbacks=[saving, pf.callbacks.EMA(0.9)])
    trainer.fit(model, (X, Y), (X, Y), batch_size=16)


@pytest.fixture(scope="module")
def trained(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("trained")
    ranks(2, train, str(home))
    return home


@pytest.fixture
def home(trained: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "home"))


def inspect(*words: object) -> Result:
    return CliRunner().invoke(main, ["inspect", *map(str, words)])


def test_a_checkpoint(home: Path) -> None:
    result = inspect(home, "--best", "--verify", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    files = {file.name: file.stat().st_size for file in (home / "step-00000002").iterdir()}
    assert found.pop("files") == files
    assert found.pop("size") == sum(files.values()) == sum(found["bytes"].values())
    numbers = 8 * 8 + 8 + 8 + 8 * 3 + 3  # the tied weight counts once
    assert found.pop("numbers") == {"float32": numbers}
    assert {part: found["bytes"][part] for part in ("model", "callbacks")} == {
        "model": 4 * numbers,
        # An average is kept under both names of a tied weight.
        "callbacks": 4 * (numbers + 8 * 8),
    }
    steps = 5 * 4  # one number for each of five parameters
    assert found.pop("bytes")["optimizer"] == 2 * 4 * numbers + steps
    best = found.pop("best")["Checkpoint-1"]
    assert best.pop("value") == found["metrics"]["val_loss"] == found.pop("values")["2"]
    assert best == {"monitor": "val_loss", "step": 2}
    assert found.pop("metrics").keys() == {"loss", "lr", "val_loss"}
    assert found.pop("written")[:2] == "20"
    assert found == {
        "path": str(home / "step-00000002"),
        "step": 2,
        "epoch": 1,
        "plan": {"fsdp": 2, "clip_norm": 1.0},
        "world_size": 2,
        "model_class": "Sequential",
        "callbacks": ["Checkpoint-1", "EMA-1"],
        "problem": "",
        "verified": True,
    }


def test_it_is_printed(home: Path) -> None:
    lines = [line.rstrip() for line in inspect(home / "step-00000006").stdout.splitlines()]
    assert lines[0] == str(home / "step-00000006")
    facts = dict(line.split("  ", 1) for line in lines if not line.startswith(" ") and "  " in line)
    assert facts["step"].strip() == "6, 3 complete epochs"
    assert facts["plan"].strip() == "fsdp=2, clip_norm=1.0"
    assert facts["weights"].strip() == "107 float32"
    assert facts["best"].strip().startswith("val_loss ")
    assert facts["best"].endswith(" at step 2 (Checkpoint-1)")
    assert facts["checksums"].strip() == "not compared (--verify does); all files are there"
    assert max(map(len, lines)) < 120  # no terminal, and no line is broken or padded to the width of one
    assert any(line.split() == ["model/0.weight", "float32", "8", "×", "8", "2"] for line in tensor_lines(home))


def tensor_lines(home: Path) -> list[str]:
    return inspect(home, "--tensors").stdout.splitlines()


def test_a_folder_has_a_line_for_each(home: Path) -> None:
    result = inspect(home)
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [(line[0], line[1], line[-1]) for line in lines[2:]] == [
        ("step-00000002", "2", "best"),
        ("step-00000004", "4", lines[3][-1]),
        ("step-00000006", "6", "last"),
    ]
    values = [float(line[6]) for line in lines[2:]]
    assert values == sorted(values, reverse=True)
    assert [line.split()[-1] for line in inspect(home, "--verify").stdout.splitlines()[2:]] == ["intact"] * 3


def test_what_is_not_whole_is_shown_all_the_same(home: Path) -> None:
    (home / "step-00000004" / "tensors-00001.safetensors").unlink()
    tensors = home / "step-00000006" / "tensors-00001.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"?")
    quick, thorough = inspect(home), inspect(home, "--verify", "--json")
    assert quick.exit_code == thorough.exit_code == 1
    assert "step-00000004' is no whole checkpoint: it has no tensors-00001.safetensors. Use another" in quick.stdout
    problems = {Path(one["path"]).name: one["problem"] for one in json.loads(thorough.stdout)}
    assert problems["step-00000002"] == ""
    assert "it has no tensors-00001" in problems["step-00000004"]
    assert "is damaged: tensors-00001.safetensors changed" in problems["step-00000006"]
    assert inspect(home / "step-00000006").exit_code == 0
    one = inspect(home / "step-00000006", "--verify")
    assert one.exit_code == 1
    assert "107 float32" in one.stdout
    assert "do not hold" in one.stdout
    gone = inspect(home / "step-00000004")
    assert gone.exit_code == 1
    assert gone.stderr.startswith("paraflow inspect: ")
    assert "has no tensors-00001.safetensors" in gone.stderr


def test_one_put_together_from_two_saves_or_cut_short_is_told_without_reading_tensors(home: Path) -> None:
    step, other, last = (home / f"step-0000000{number}" for number in (2, 4, 6))
    shutil.copy(other / "tensors-00001.safetensors", step)
    with (last / "tensors-00000.safetensors").open("ab") as file:
        file.write(b"0")
    results = [inspect(place) for place in (step, last, home)]
    assert [result.exit_code for result in results] == [1, 1, 1]
    assert "put together from two saves: tensors-00001.safetensors is not of this one." in results[0].stdout
    assert "tensors-00000.safetensors changed since it was written. Use another:" in results[1].stderr
    assert inspect(other).exit_code == 0


def test_nothing_there_is_a_sentence(tmp_path: Path) -> None:
    result = inspect(tmp_path)
    assert result.exit_code == 1
    assert "has no checkpoint in it" in result.stderr
