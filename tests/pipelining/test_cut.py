"""Models in stages: every unit in exactly one, balanced or as asked, and nothing left of other stages."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import paraflow as pf
from paraflow.models import CausalLM, CausalLMConfig, MaskedLM, MaskedLMConfig
from paraflow.pipelining.balance import balance, estimated_times
from paraflow.pipelining.cut import cut, units_of
from paraflow.pipelining.glue import weights_used_by_glue
from paraflow.pipelining.hollow import hollow
from paraflow.pipelining.ties import users_of
from tests.models.test_transformers import build


class VisionLike(nn.Module):
    """A parameter of its own, a layer without parameters but with statistics, blocks in a list, a head in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.statistics = nn.BatchNorm2d(8, affine=False)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(4))
        self.pool = nn.AdaptiveAvgPool1d(1)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))


def causal() -> nn.Module:
    return CausalLM(CausalLMConfig(vocab_size=64, layers=4, hidden=16, heads=2, context=8))


def untied() -> nn.Module:
    return CausalLM(CausalLMConfig(vocab_size=64, layers=4, hidden=16, heads=2, context=8, tied=False))


def masked() -> nn.Module:
    return MaskedLM(MaskedLMConfig(vocab_size=64, layers=3, hidden=16, heads=2, context=8))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "row": lambda: nn.Sequential(*(nn.Linear(4, 4) if at % 2 == 0 else nn.Tanh() for at in range(9))),
    "vision": VisionLike,
    "causal": causal,
    "untied": untied,
    "masked": masked,
    "bert": lambda: build("bert"),
    "gpt2": lambda: build("gpt2"),
    "llama": lambda: build("llama"),
}


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_in_one_stage_or_tied(name: str, count: int) -> None:
    model = MODELS[name]()
    parts = cut(model, count)
    assert len(parts.stages) == count
    assert all(parts.stages)
    assert [n for stage in parts.names for n in stage] == [unit.name for unit in units_of(model)]
    users = users_of(model, parts, weights_used_by_glue(model, units_of(model)))
    assert list(users) == [n for n, _ in model.named_parameters()]
    in_stages = [{id(p) for unit in stage for p in unit.module.parameters()} for stage in parts.stages]
    in_units = set().union(*in_stages)
    for parameter_name, parameter in model.named_parameters():
        stages = {at for at, held in enumerate(in_stages) if id(parameter) in held}
        assert stages <= set(users[parameter_name])
        assert len(stages) == 1 or parameter_name.endswith(("weight", "bias")) or id(parameter) not in in_units


@pytest.mark.parametrize("name", MODELS)
def test_a_stage_has_only_what_it_uses(name: str) -> None:
    whole = MODELS[name]()
    names = [n for n, _ in whole.named_parameters()]
    buffers = set(dict(whole.named_buffers()))
    found: list[list[str]] = []
    for stage in range(2):
        model = MODELS[name]()
        parts = cut(model, 2)
        users = users_of(model, parts, weights_used_by_glue(model, units_of(model)))
        hollow(model, parts, [stage], [n for n, stages in users.items() if stage in stages])
        found.append([n for n, _ in model.named_parameters()])
        assert found[-1] == [n for n in names if stage in users[n]]
        buffers -= set(dict(model.named_buffers()))
        model.load_state_dict(whole.state_dict(), strict=False)
    assert set(found[0]) | set(found[1]) == set(names)
    assert not buffers


def test_tied_weights_are_on_the_stages_that_use_them() -> None:
    tables = {"causal": "embedding.weight", "masked": "embedding.weight", "gpt2": "transformer.wte.weight"}
    for name, tied in tables.items():
        model = MODELS[name]()
        users = users_of(model, cut(model, 3), weights_used_by_glue(model, units_of(model)))
        assert users[tied] == (0, 2), name
        shared = {n for n, stages in users.items() if len(stages) > 1}
        assert shared == {tied} | ({"head_bias"} if name == "masked" else set())
    model = untied()
    assert weights_used_by_glue(model, units_of(model)) == []  # the branch that is not taken
    vision = VisionLike()
    assert users_of(vision, cut(vision, 3), [])["token"] == (0, 1, 2)
    assert users_of(vision, cut(vision, 3), [], shared=["stem.*"])["stem.bias"] == (0, 1, 2)


def by_trying(times: list[float], sizes: list[float], stages: int) -> tuple[float, float]:
    def worst(firsts: tuple[int, ...], values: list[float]) -> float:
        return max(sum(values[a:b]) for a, b in itertools.pairwise((0, *firsts, len(values))))

    ways = itertools.combinations(range(1, len(times)), stages - 1)
    return min((worst(way, times), worst(way, sizes)) for way in ways)


def test_balance_is_the_best_of_all_ways() -> None:
    draw = random.Random(0)
    for _ in range(60):
        count = draw.randint(2, 9)
        times = [float(draw.choice([0, 1, 1, 2, 5])) for _ in range(count)]
        sizes = [float(draw.randint(1, 9)) for _ in range(count)]
        for stages in range(1, count + 1):
            firsts = balance(times, sizes, stages)
            assert firsts[0] == 0
            assert all(a < b for a, b in itertools.pairwise(firsts))
            pairs = list(itertools.pairwise((*firsts, count)))
            found = max(sum(times[a:b]) for a, b in pairs), max(sum(sizes[a:b]) for a, b in pairs)
            assert found == by_trying(times, sizes, stages)


def test_what_is_looked_up_takes_no_time_and_the_head_counts() -> None:
    model = build("llama")
    times = dict(zip([u.name for u in units_of(model)], estimated_times(model, units_of(model)), strict=True))
    assert times["model.embed_tokens"] == 0
    assert times["lm_head"] == 2 * 50 * 16
    assert times["model.layers.0"] == times["model.layers.1"] > 0
    tied = causal()
    table = 2.0 * 64 * 16
    assert cut(tied, 2, glue=50 * table).names[1] == ("norm",)
    convolutions = nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, stride=2))
    first, second, third = estimated_times(convolutions, units_of(convolutions))
    assert (first, second, third) == (2 * 216, 2 * 576 / 4, 2 * 576 / 16)


def test_measured_times_move_the_cut() -> None:
    model = MODELS["row"]()
    names = [unit.name for unit in units_of(model)]
    assert cut(model, 2).names == (tuple(names[:3]), tuple(names[3:])) or len(cut(model, 2).names[0]) in (2, 3)
    slow = dict.fromkeys(names, 1.0) | {names[0]: 4.0}
    parts = cut(model, 2, costs=slow)
    assert parts.names == ((names[0],), tuple(names[1:]))
    assert parts.shares == (0.5, 0.5)
    assert "stage 0: 0, 20 parameters, 50% of the time" in parts.describe()[0]
    with pytest.raises(pf.PlanError, match="costs must give the seconds of each unit"):
        cut(model, 2, costs={"0": 1.0})


@pytest.mark.parametrize(
    ("stages", "names"),
    [
        (["blocks.2"], (("embedding", "blocks.0", "blocks.1"), ("blocks.2", "blocks.3", "norm"))),
        (
            [["embedding"], ["blocks", "norm"]],
            (("embedding",), ("blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm")),
        ),
        ([["embedding", "blocks.0.attention"], ["blocks", "norm"]], None),
    ],
)
def test_stages_by_name(stages: Any, names: Any) -> None:
    if names is None:
        with pytest.raises(pf.PlanError, match="belongs to exactly one stage"):
            cut(causal(), 2, stages=stages)
        return
    assert cut(causal(), 2, stages=stages).names == names


def test_a_unit_is_taken_apart_where_stages_ask_for_it() -> None:
    model = nn.ModuleDict({"body": nn.TransformerEncoderLayer(8, 2, 16), "head": nn.Linear(8, 2)})
    parts = cut(model, 2, stages=["body.linear1"])
    assert parts.names[0] == ("body.self_attn",)
    assert parts.names[1][0] == "body.linear1"


@pytest.mark.parametrize(
    ("stages", "count", "said"),
    [
        (["blocks.1", "blocks.2"], 2, "names 2 modules that begin a further stage"),
        (["blocks.9"], 2, "'blocks.9', which is no module with parameters of CausalLM. It has embedding, "),
        (["blocks.2", "blocks.1"], 3, "in the order in which they are called"),
        ([["embedding", "blocks"], ["nothing", "norm"]], 2, "Stage 1 names 'nothing'"),
        ([["embedding", "blocks"], ["blocks.3", "norm"]], 2, r"of 'blocks.3' stages \[0, 1\] name it"),
        ([["embedding"], ["blocks"]], 2, "of 'norm' no stage names it"),
        ([["embedding"], ["blocks"], ["norm"]], 2, "lists the modules of 3 stages, and the plan has 2"),
    ],
)
def test_wrong_names_are_refused(stages: Any, count: int, said: str) -> None:
    with pytest.raises(pf.PlanError, match=said):
        cut(causal(), count, stages=stages)


def test_more_stages_than_units_is_refused() -> None:
    with pytest.raises(pf.ModelError, match=r"has 2 units to put in stages \(0, 1\), and the plan has 3 stages"):
        cut(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 3)


def test_what_is_taken_out_of_recurrent_layers_is_let_go_of() -> None:
    model = nn.Sequential(nn.LSTM(4, 4), nn.Linear(4, 4))
    hollow(model, cut(model, 2), [1], [])
    assert list(model[0]._flat_weights) == [None] * 4  # type: ignore[arg-type]


class HeadFirst(nn.Module):
    """Its layers are made in another order than they are called in."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.unused = nn.Linear(1, 1)
        self.stem = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_units_stand_in_the_order_in_which_forward_has_them() -> None:
    names = [unit.name for unit in units_of(HeadFirst())]
    assert names == ["stem", "norm", "blocks.0", "blocks.1", "unused", "head"]


@pytest.mark.parametrize("seed", range(20))
def test_no_stage_is_larger_than_it_may_be(seed: int) -> None:
    chosen = random.Random(seed)
    times, sizes = [chosen.randint(0, 9) for _ in range(7)], [chosen.randint(1, 9) for _ in range(7)]
    ways = [(0, *cuts) for cuts in itertools.combinations(range(1, 7), 2)]

    def stages(values: list[int], way: tuple[int, ...]) -> list[int]:
        return [sum(values[first:stop]) for first, stop in zip(way, (*way[1:], 7), strict=True)]

    for most in (*range(1, 40, 3), 1000):
        fitting = [way for way in ways if max(stages(sizes, way)) <= most]
        if not fitting:
            with pytest.raises(pf.PlanError, match=r"a stage with .* of parameters at least, and one may have"):
                balance(times, sizes, 3, most)
            continue
        found = tuple(balance(times, sizes, 3, most))
        best = min((max(stages(times, way)), max(stages(sizes, way))) for way in fitting)
        assert (max(stages(times, found)), max(stages(sizes, found))) == best


def test_stage_memory_counts_all_that_is_kept_of_parameters() -> None:
    # Four blocks in front that are fast and large: by time alone the first stage has all of them.
    model = nn.Sequential(*(nn.Embedding(1000, 8) for _ in range(4)), *(nn.Linear(8, 8) for _ in range(2)))
    assert [len(part) for part in cut(model, 2).stages] == [5, 1]
    large = 4 * 1000 * 8 * 4  # parameters, gradients and Adam's averages of one table, in bytes
    narrow = pf.plugins.Pipeline(2, stage_memory=3 * large)
    assert [len(part) for part in cut(model, 2, most_bytes=narrow._most_bytes).stages] == [2, 4]
    with pytest.raises(pf.PlanError, match=r"63\.1 KiB of parameters at least, and one may have 31\.2 KiB"):
        cut(model, 2, most_bytes=pf.plugins.Pipeline(2, stage_memory=large)._most_bytes)
    with pytest.raises(pf.PlanError, match="stage_memory"):
        pf.plugins.Pipeline(2, stage_memory="much")


class Loops(nn.Module):
    """As many multiplications in each block, and one that does them a hundred times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.often = Often()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.often(x)


class Often(nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, 64)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for _ in range(100):
            x = super().forward(x)
        return x


def test_measured_times_balance_what_weights_do_not_show() -> None:
    from paraflow.pipelining import unit_seconds

    model = pf.configure(Loops(), loss="mse")
    batch = torch.randn(64, 64), torch.randn(64, 64)
    drawn = torch.get_rng_state()
    costs = unit_seconds(model, batch)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert float(model.often.calls) == 0
    assert list(costs) == ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "often"]
    assert [len(part) for part in cut(model, 2).stages] == [2, 3]
    assert [len(part) for part in cut(model, 2, costs=costs).stages] == [4, 1]
