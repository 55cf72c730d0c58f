"""`paraflow explain` runs a script up to its first fit, and says what it would do on so many ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import paraflow as pf
from paraflow.cli import main
from paraflow.explaining import explain, explain_script
from paraflow.task_graph import Traffic, task_graph, traffic_of
from tests.scopes.models import Blocks, HeadBeside

HEAD = """
import sys
import torch
import paraflow as pf
from tests.scopes.models import HeadBeside, vectors

if __name__ == "__main__":
    data = vectors(64)
    trainer = pf.Trainer(precision=sys.argv[1])
    trainer.fit(HeadBeside(1000), data, batch_size=int(sys.argv[2]))
    raise AssertionError("trained")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "head.py"
    path.write_text(HEAD)
    return path


def lines(text: str) -> list[str]:
    """The lines of a text, of which runs of blanks are one."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def test_a_script_is_explained_as_on_so_many_ranks(script: Path) -> None:
    places = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    before, words = {name: os.environ.get(name) for name in places}, list(sys.argv)
    said = lines(explain_script(script, 4, ["bf16", "32"]))
    assert said[0] == "HeadBeside: 9,128 parameters, on 4 ranks: dp=4, precision=bf16"
    for line in (
        "dp 4 fills the world of 4",
        "precision bf16 the Trainer's arguments",
        "options of split modules=head the model's scopes",
        "replica features 128 0 to 3 128",
        "split (split over data ranks) head 9,000 0 to 3 2,250",
        "gradients of 128 parameters, averaged 4 replicas 768 B",
        "inputs of head, gathered, and their gradients 4 data ranks 1.5 KiB",  # 2 · 3 ranks · 8 samples · 8 features
    ):
        assert line in said, "\n".join(said)
    assert {name: os.environ.get(name) for name in places} == before
    assert sys.argv == words


def test_the_command_prints_refusals_as_they_are(script: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    done = run(main, ["explain", "-n", "2", str(script), "fp32", "32"])
    assert done.exit_code == 0
    assert "on 2 ranks: dp=2" in done.output
    refused = run(main, ["explain", "-n", "4", str(script), "fp32", "2"])
    assert refused.exit_code == 1
    assert "[batch-covers-ranks] A batch of 2 cannot be divided over 4 data ranks" in refused.output
    idle = tmp_path / "idle.py"
    idle.write_text("import sys\nsys.exit(3)\n")
    assert "ended without a call of Trainer.fit" in run(main, ["explain", str(idle)]).output
    assert "There is no script" in run(main, ["explain", "nowhere.py"]).output


def test_one_process_is_told_how_to_ask_for_more(script: Path) -> None:
    text = explain_script(script, 1, ["fp32", "32"])
    assert "One process: nothing moves" in text
    assert "what moves" not in text


def test_an_error_of_the_script_is_its_own(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n")
    fit = pf.Trainer.fit
    with pytest.raises(ZeroDivisionError):
        explain_script(broken, 2)
    assert pf.Trainer.fit is fit


def test_stages_have_ranks_of_their_own_and_boundaries() -> None:
    stages = (("embedding", "blocks.0", "blocks.1"), ("blocks.2", "blocks.3", "norm", "head"))
    plan = pf.Plan(pp=2, dp=2, accumulate=4, options={"pipeline": {"stages": stages}})
    model, tokens = Blocks(), torch.zeros(2, 5, dtype=torch.long)
    graph = task_graph(model, plan, traffic_of(model, lambda: model(tokens)))
    assert [(node.stage, node.ranks, node.modules) for node in graph.nodes] == [
        (0, (0, 1), ("embedding", "blocks.0", "blocks.1")),
        (1, (2, 3), ("blocks.2", "blocks.3", "norm", "head")),
    ]
    assert sum(node.parameters for node in graph.nodes) == sum(p.numel() for p in model.parameters())
    boundary = next(move for move in graph.moves if "stage 1" in move.between and "stage 0" in move.between)
    assert boundary.bytes == 2 * 4 * (2 * 5 * 8 * 4)
    unknown = task_graph(model, plan, {})
    assert [move.bytes for move in unknown.moves if "blocks.1" in move.what] == [None]


def test_what_is_split_is_held_in_parts() -> None:
    plan = pf.Plan(tp=2, dp=2, options={"tensor_parallel": {"modules": ("blocks",)}})
    graph = task_graph(Blocks(scoped=False), plan, {})
    split = next(node for node in graph.nodes if node.layout == "split")
    assert split.held == -(-split.parameters // 2)
    whole = next(node for node in graph.nodes if node.layout == "replica")
    assert whole.held == whole.parameters
    assert {move.between for move in graph.moves} == {"2 replicas", "2 parts"}


def test_traffic_is_that_of_the_first_call() -> None:
    layer = nn.Sequential(nn.Linear(4, 2))
    found = traffic_of(layer, lambda: (layer(torch.zeros(3, 4)), layer(torch.zeros(5, 4))))
    assert found == {"0": Traffic(3 * 4 * 4, 3 * 2 * 4, 3)}


def test_a_model_whose_step_needs_values_is_explained_without_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    class Peeks(HeadBeside):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if float(x.sum()) < 1e9 else x

    monkeypatch.setenv("WORLD_SIZE", "2")
    data = (torch.zeros(8, 6), torch.zeros(8, dtype=torch.long))
    text = explain(pf.Trainer(), Peeks(), data, batch_size=4)
    assert "not known without a step on data" in text
