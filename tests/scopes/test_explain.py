"""`paraflow explain` runs a script up to its first fit, and says what it would do on so many ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import paraflow as pf
from paraflow.cli import main
from paraflow.explaining import explain, explain_script
from paraflow.moves import Traffic
from paraflow.task_graph import task_graph, traffic_of
from tests.pool import Pool
from tests.scopes.models import Blocks, HeadBeside
from tests.scopes.moves import sent_and_said

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
        "inputs of head, gathered, and their gradients 4 data ranks 768 B",  # 2 · 3 ranks · 8 samples · 8 features · 2
        "labels, maxima, sums and targets' scores of the rows of head 4 data ranks 1.4 KiB",  # 3 · 8 · (12 + 4 · 12)
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
    assert boundary.bytes == 4 * (2 * 5 * 8 * 4)  # of each rank: one sends activations, the other gradients
    unknown = task_graph(model, plan, {})
    assert [move.bytes for move in unknown.moves if "blocks.1" in move.what] == [None]


def test_what_is_split_is_held_in_parts() -> None:
    plan = pf.Plan(tp=2, dp=2, options={"tensor_parallel": {"modules": ("blocks",)}})
    graph = task_graph(Blocks(scoped=False), plan, {})
    split = next(node for node in graph.nodes if node.layout == "split")
    assert split.held == split.parameters - 4 * (8 * 16 + 8)  # of blocks 8 → 16 → 8, the bias behind stays whole
    whole = next(node for node in graph.nodes if node.layout == "replica")
    assert whole.held == whole.parameters
    assert {move.between for move in graph.moves} == {"2 replicas", "2 parts"}


def test_the_bytes_are_those_that_are_sent(ranks: Pool) -> None:
    for beside in (False, True):
        for sent, said, unknown in ranks(2, sent_and_said, beside):
            assert sent == said > 0
            assert unknown == set()


class Heads(nn.Module):
    """An attention of three heads, of which two ranks hold two and one."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 3, 4
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_uneven_heads_and_features_are_held_as_they_lie() -> None:
    graph = task_graph(Heads(), pf.Plan(tp=2), {})
    (node,) = graph.nodes
    assert node.held == node.parameters == 4 * 13 * 12
    assert [move.bytes for move in graph.moves if "whole on each rank" in move.what] == [4 * (3 * 13 + 12) * 12]
    pair = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 2))
    (node,) = task_graph(pair, pf.Plan(tp=2), {}).nodes
    assert node.held == 4 * (4 + 1 + 2) + 2


def gathers(**fields: Any) -> list[int | None]:
    """The bytes of what shards send: parameters, then gradients, in units of all parameters' shards."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    moves = task_graph(model, pf.Plan(fsdp=2, **fields), {}).moves
    return [move.bytes // 64 for move in moves if move.between == "2 shards" and move.bytes is not None]


def test_shards_are_gathered_as_often_as_they_are_let_go_of() -> None:
    assert gathers(accumulate=3) == [2 * 3, 3]
    assert gathers(accumulate=3, zero=2) == [1, 3]
    assert gathers(accumulate=3, zero=1) == [1, 1]
    staged = {"stages": (("0",), ("1",))}
    half = gathers(accumulate=4, pp=2, options={"pipeline": staged})
    assert half == [0, 2]  # of half of the parameters: once a step
    assert gathers(accumulate=4, pp=2, options={"pipeline": {**staged, "reshard": True}}) == [4, 2]


def test_traffic_is_that_of_the_first_call() -> None:
    layer = nn.Sequential(nn.Linear(4, 2))
    found = traffic_of(layer, lambda: (layer(torch.zeros(3, 4)), layer(torch.zeros(5, 4))))
    assert found == {"0": Traffic(3 * 4 * 4, 3 * 2 * 4, 3, has_gradient=False)}


def test_a_model_whose_step_needs_values_is_explained_without_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    class Peeks(HeadBeside):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if float(x.sum()) < 1e9 else x

    monkeypatch.setenv("WORLD_SIZE", "2")
    data = (torch.zeros(8, 6), torch.zeros(8, dtype=torch.long))
    text = explain(pf.Trainer(), Peeks(), data, batch_size=4)
    assert "not known without a step on data" in text
