"""What scopes ask of a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import paraflow as pf
from paraflow.resolve import Request
from paraflow.scope_plans import fields_of
from paraflow.scope_tree import Scopes
from tests.scopes.models import Blocks, HeadBeside, Staged

CPU = torch.device("cpu")


def said(model: nn.Module, world: int, **fields: Any) -> dict[str, Any]:
    return fields_of(model, world, fields, CPU)


def split_block(n: int | None = None, replica: int | None = None) -> nn.Module:
    with pf.replica(replica):
        first = nn.Linear(8, 8)
        with pf.split(n):
            block = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        return nn.Sequential(first, block)


def test_a_world_of_one_and_a_model_without_scopes_ask_for_nothing() -> None:
    assert (
        said(HeadBeside(), 1) == said(Blocks(), 1) == said(split_block(2), 1) == said(HeadBeside(scoped=False), 4) == {}
    )


def test_a_replica_alone_asks_for_nothing_that_dp_does_not_fill() -> None:
    with pf.replica():
        model = nn.Sequential(nn.Linear(2, 2))
    assert said(model, 4) == {}


def test_a_split_in_a_replica_is_tensor_parallel() -> None:
    modules = {"tensor_parallel": {"modules": ("1",)}}
    assert said(split_block(2), 4) == {"tp": 2, "options": modules}
    assert said(split_block(), 4) == {"tp": 4, "options": modules}
    assert said(split_block(), 4, dp=2) == {"tp": 2, "options": modules}
    assert said(split_block(), 4, tp=2) == {"tp": 2, "options": modules}
    assert said(split_block(None, 2), 4) == {"tp": 2, "options": modules}
    assert said(split_block(2, 2), 4) == {"tp": 2, "options": modules}
    assert said(split_block(2, 4), 4, fsdp=2) == {"tp": 2, "options": modules}


def test_a_split_around_everything_needs_no_names() -> None:
    with pf.split(2):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert said(model, 4) == {"tp": 2}


def test_a_split_beside_replicas_is_over_the_data_ranks() -> None:
    assert said(HeadBeside(), 4) == {"options": {"split": {"modules": ("head",)}}}

    class Uncovered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Linear(2, 2)
            with pf.split(4, dim=0):
                self.head = nn.Linear(2, 9)

    assert said(Uncovered(), 4) == {"options": {"split": {"modules": ("head",), "plan": {"head": "colwise"}}}}
    assert said(Uncovered(), 8)["options"]["split"]["degree"] == 4
    with pytest.raises(pf.PlanError, match=r"split\(4\) beside replicas in Uncovered.*6 data ranks\. Start 4, 8 or 12"):
        said(Uncovered(), 6)
    assert said(Uncovered(), 4, dp=1, fsdp=4) != {}  # the plugin's rule refuses it


def test_a_dimension_that_a_layer_cannot_be_split_along_is_refused() -> None:
    for layer in (nn.Embedding(20, 8), nn.MultiheadAttention(8, 2)):
        beside = nn.ModuleDict({"features": nn.Linear(2, 2)})
        with pf.split(dim=1):
            beside["layer"] = layer
        with pytest.raises(pf.PlanError, match=r"split\(dim=1\) in ModuleDict stands around layer"):
            said(beside, 4)


def test_stages_are_the_pipelines_and_hold_what_no_scope_covers() -> None:
    stages = (("embedding", "blocks.0", "blocks.1"), ("blocks.2", "blocks.3", "norm", "head"))
    expected = {"pp": 2, "accumulate": 4, "options": {"pipeline": {"stages": stages, "schedule": "1f1b"}}}
    assert said(Blocks(), 2) == said(Blocks(), 4) == expected
    assert said(Staged(), 4)["options"]["pipeline"] == {"stages": (("first", "second"), ("third", "head"))}
    fields = said(Blocks(cut=4), 2, pp=2)
    assert fields["pp"] == 2
    assert fields["options"]["pipeline"]["chunks"] == 2
    assert len(fields["options"]["pipeline"]["stages"]) == 4


def test_every_parameter_is_in_exactly_one_stage() -> None:
    model = Blocks(cut=4)
    stages = Scopes.of(model).modules_of_stages()
    for name, _ in model.named_parameters():
        holding = [i for i, names in enumerate(stages) for module in names if name.startswith(f"{module}.")]
        assert len(holding) == 1, name


def test_splits_in_stages_have_one_degree() -> None:
    fields = said(Blocks(width=2), 8)
    assert (fields["pp"], fields["tp"]) == (2, 2)
    assert fields["options"]["tensor_parallel"] == {"modules": ("blocks",)}
    with pf.pipeline():
        with pf.stage(), pf.split():
            first = nn.Linear(2, 2)
        with pf.stage():
            second = nn.Linear(2, 2)
    fields = said(nn.Sequential(first, second), 8)
    assert (fields["pp"], fields["tp"]) == (2, 4)
    with pf.split(2):
        one = nn.Linear(2, 2)
    with pf.split(4):
        other = nn.Linear(2, 2)
    with pytest.raises(pf.PlanError, match=r"splits over \[2, 4\] ranks"):
        said(nn.Sequential(one, other), 8)


@pytest.mark.parametrize(
    ("model", "world", "message"),
    [
        (split_block(2), 3, "take 2 ranks, of which a world of 3 is no multiple. Start 2, 4 or 6 processes"),
        (Blocks(), 3, "take 2 ranks, of which a world of 3 is no multiple"),
        (Blocks(width=2), 6, "take 4 ranks, of which a world of 6 is no multiple. Start 4, 8 or 12 processes"),
        (split_block(2, 3), 6, r"replica\(3\) in Sequential holds what takes 2 ranks, not 3"),
        (split_block(2, 4), 4, r"replica\(4\) in Sequential holds what takes 2 ranks, not 4"),
        (HeadBeside(ranks=2), 4, r"replica\(2\) in HeadBeside holds what takes 1 rank, not 2. Write replica\(\)"),
    ],
)
def test_a_world_that_does_not_fit_is_told_which_would(model: nn.Module, world: int, message: str) -> None:
    with pytest.raises(pf.PlanError, match=message):
        said(model, world)


def test_scopes_that_cannot_stand_together_are_refused_on_one_process_too() -> None:
    with pf.pipeline(), pf.stage():
        alone = nn.Linear(2, 2)
    with pytest.raises(pf.PlanError, match="has 1 stages with parameters; it needs two"):
        said(nn.Sequential(alone), 1)
    with pf.split():
        head = nn.Linear(2, 2)
    with pytest.raises(pf.PlanError, match="a split beside a pipeline"):
        said(nn.Sequential(Blocks(), head), 1)
    with pytest.raises(pf.PlanError, match="has 2 pipelines"):
        said(nn.Sequential(Blocks(), Blocks()), 1)
    with pf.auto_parallel():
        auto = nn.Linear(2, 2)
    with pytest.raises(pf.PlanError, match=r"auto_parallel\(\) beside split"):
        said(nn.Sequential(auto, head), 1)
    with pytest.raises(pf.PlanError, match="a split in a replica"):
        said(nn.Sequential(split_block(2), head), 1)


def test_a_single_parameter_is_not_split() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with pf.split():
                self.table = nn.Parameter(torch.zeros(4, 4))
            self.rest = nn.Linear(2, 2)

    with pytest.raises(pf.PlanError, match="table is made in a split scope"):
        said(Own(), 4)


def test_auto_parallel_takes_the_fewest_stages_that_fit() -> None:
    with pf.auto_parallel():
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    bytes_of_all = 8 * 64 * 64 * 16
    assert said(model, 8) == {}
    assert said(model, 8, memory_budget=bytes_of_all // 2) == {"pp": 2}
    assert said(model, 8, memory_budget=bytes_of_all // 3) == {"pp": 4}
    assert said(model, 8, memory_budget=bytes_of_all // 3, dp=2) == {"pp": 4}
    assert said(model, 8, memory_budget=1, fsdp=8) == {}
    with pytest.raises(pf.PlanError, match=r"8 ranks with .* each do not hold that"):
        said(model, 8, memory_budget=1)


def test_what_contradicts_the_scopes_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(pf.PlanError, match="tp is 4 by the Trainer's arguments and 2 by the model's scopes"):
        Request(flags={"tp": 4}).with_scopes(split_block(2), CPU)
    with pytest.raises(pf.PlanError, match="accumulate is 2 by the Trainer's arguments and 4 by the model's scopes"):
        Request(flags={"accumulate": 2}).with_scopes(Blocks(), CPU)
    with pytest.raises(pf.PlanError, match=r"by the Trainer's arguments and .* by the model's scopes"):
        Request(flags={"options": {"pipeline": {"schedule": "gpipe"}}}).with_scopes(Blocks(), CPU)


def test_options_beside_those_of_the_scopes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    plan = pf.Plan(options={"pipeline": {"reshard": True}})
    fields = Request(plan=plan, flags={"precision": "bf16"}).with_scopes(Blocks(), CPU).fields()
    assert set(fields["options"]["pipeline"]) == {"reshard", "stages", "schedule"}
    assert (fields["pp"], fields["precision"]) == (2, "bf16")
