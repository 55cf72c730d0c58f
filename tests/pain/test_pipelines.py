"""What pipelines get wrong: values that go past stages, micro-batches that are short or few, what is divided twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import paraflow as pf
from paraflow.parts import whole
from tests.pain.composed import SEED, Steps, Task, assert_alike
from tests.parity.runs import whole_parameters

WIDTH, TOKENS, IGNORED = 6, 5, -100


class Block(nn.Module):
    """Takes a mask or none and a skip or none, and gives a tuple with None in it, and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(
        self, x: torch.Tensor, skip: torch.Tensor | None, *, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, dict[str, Any]]:
        inner = self.norm(x if skip is None else x + 0.5 * skip)
        inner = torch.tanh(self.up(inner))
        if mask is not None:
            inner = inner * mask
        return x + self.down(inner), None, {"inner": inner, "nothing": None}


class Awkward(pf.Model):
    """The first block's output goes to the last one, a mask of the batch to all, and a layer is never called."""

    def __init__(self, spare: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Linear(4, WIDTH)
        self.positions = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)
        self.spare = nn.Linear(2, 2) if spare else None
        self.configure(optimizer="sgd", lr=1.0)

    def forward(self, x: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        mask = there[..., None].to(x.dtype)
        x = self.stem(x) + self.positions(torch.arange(x.shape[1]))
        first: torch.Tensor | None = None
        for place, block in enumerate(self.blocks):
            skip = first if place == 3 else None  # over all stages between
            x, nothing, found = block(x, skip, mask=None if place == 1 else mask)
            assert nothing is None
            assert found["nothing"] is None
            first = x if first is None else first
        return self.head(x + found["inner"].mean(-1, keepdim=True))

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        there = y != IGNORED
        total = functional.cross_entropy(self(x, there).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
        return total, there.sum()

    def mean_loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total, count = self.training_step((x, y))
        return total / count


def rows(count: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of which some have all targets and some few, so that micro-batches weigh differently."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, TOKENS, 4, generator=generator)
    y = torch.randint(0, 3, (count, TOKENS), generator=generator)
    y[torch.arange(TOKENS)[None] > torch.arange(count)[:, None] % TOKENS] = IGNORED
    return x, y


TASK = Task(Awkward, rows(), batch_size=8, epochs=2, clip=0.5)  # a last batch of three


def named(schedule: str, chunks: int = 1, **more: Any) -> dict[str, Any]:
    return {"options": {"pipeline": {"schedule": schedule, "chunks": chunks, **more}}}


Plans = list[dict[str, Any]]

ON_TWO: Plans = [
    {"pp": 2},  # fewer micro-batches than stages
    {"pp": 2, "accumulate": 3, "activation_checkpointing": "full"},
    {"pp": 2, "accumulate": 4, **named("zbv", 2)},
]
ON_FOUR: Plans = [
    {"pp": 2, "dp": 2, "accumulate": 4, **named("zbv", 2)},
    {"pp": 2, "fsdp": 2, "zero": 2, "accumulate": 3},
    {"pp": 2, "fsdp": 2, "zero": 3, "accumulate": 4, **named("1f1b", reshard=True)},
]
MORE_ON_TWO: Plans = [
    {"pp": 2, "accumulate": 4, **named("gpipe")},
    {"pp": 2, **named("interleaved", 2)},
    {"pp": 2, "accumulate": 3, **named("interleaved_zero_bubble", 2)},
    {"pp": 2, **named("zbv", 2)},
]
MORE_ON_FOUR: Plans = [
    {"pp": 4, "accumulate": 3},
    {"pp": 2, "dp": 2, "accumulate": 2, **named("interleaved_zero_bubble", 2)},
    {"pp": 2, "fsdp": 2, "zero": 3, "accumulate": 2, **named("zbv", 2)},
    {"pp": 2, "fsdp": 2, "zero": 3, "accumulate": 3, "activation_checkpointing": "full"},
]


def steps_under(plans: Plans, spare: bool) -> list[Steps]:
    return [TASK.under(Awkward(spare), **plan) for plan in plans]


@pytest.mark.parametrize("plans", [ON_TWO, pytest.param(MORE_ON_TWO, marks=pytest.mark.slow)], ids=["some", "more"])
def test_steps_are_those_of_one_process(ranks: Any, plans: Plans) -> None:
    """pytorch#127964, #179279: skips over stages. DeepSpeed#2435, DeepSpeedExamples#932: tuples, None and dicts.

    ColossalAI#796: a mask and positions that later stages need. pytorch#126600: the last micro-batch is smaller, or
    there is nothing in it. torchtitan#775: fewer micro-batches than stages. pytorch PR#144352, torchtitan#2972,
    #1842: each token weighs alike, whichever micro-batch it is in. DeepSpeed#8152, #8154, torchtitan#1732: gradients
    are divided once, not in each stage or micro-batch. torchtitan#4711: every rank logs the loss, and the same one.
    """
    assert_alike(ranks(2, steps_under, plans, True), plans, TASK.by_hand())


@pytest.mark.parametrize("plans", [ON_FOUR, pytest.param(MORE_ON_FOUR, marks=pytest.mark.slow)], ids=["some", "more"])
def test_replicas_and_shards_of_stages_wait_for_all_of_a_window(ranks: Any, plans: Plans) -> None:
    """pytorch#196640, #196641: FSDP under a pipeline reduced too early or too late.

    pytorch PR#134052: of a backward in two halves, the wrong one had gradients sent.
    """
    expected = TASK.by_hand()
    for name in ("weight", "bias"):
        del expected.parameters[f"spare.{name}"]  # replicas refuse what has no gradient
    assert_alike(ranks(4, steps_under, plans, False), plans, expected)


class Factor(nn.Module):
    """No matrix product, so that it stays in fp32."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((1,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.value


class OneIsLarge(pf.Model):
    """Of four factors one is small, so that its own gradient is larger by as much than those of the others."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Factor(2.0**-100 if place == at else 1.0) for at in range(4)))
        self.configure(optimizer="sgd", lr=1.0)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layers(batch).mean()


def overflowing(plan: dict[str, Any]) -> list[tuple[list[float], float]]:
    """The factors, and the loss scale afterwards, where the gradient of one of the first or last stage overflows."""
    found = []
    for place, scale in ((0, 2.0**120), (3, 2.0**120), (0, 2.0**100)):
        precision = pf.plugins.Precision("fp16", initial_scale=scale)
        trainer = pf.Trainer(max_steps=1, progress=False, plugins=[precision], **plan)
        trainer.fit(OneIsLarge(place), torch.full((4, 1), 2.0**10), batch_size=4)  # whose gradient is 2^10 · scale
        values = [float(value) for value in whole_parameters(trainer).values()]
        found.append((values, trainer.engine.state_dict()["plugins"]["precision"]["scale"]))
    return found


def test_an_overflow_on_one_stage_drops_the_step_of_all(ranks: Any) -> None:
    """torchtitan#803: each stage looked at its own gradients, and the others went on without it."""
    for plan in ({"pp": 2}, {"pp": 2, "accumulate": 2}):
        for first, last, neither in ranks(2, overflowing, plan):
            assert first == ([2.0**-100, 1.0, 1.0, 1.0], 2.0**119)
            assert last == ([1.0, 1.0, 1.0, 2.0**-100], 2.0**119)
            assert neither == ([-(2.0**10), 1.0, 1.0, 1.0], 2.0**100)


class Halves(nn.Module):
    """A layer in fp32 before one in bf16, whose numbers are exact in eight bits."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 1, bias=False), nn.Linear(6, 1, bias=False, dtype=torch.bfloat16)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x.bfloat16()).float()


NUMBERS = torch.arange(48.0).view(8, 6) % 8


def mixed_dtypes(plans: Plans) -> list[dict[str, torch.Tensor]]:
    found = []
    for plan in plans:
        model = pf.configure(Halves(), optimizer="sgd", lr=1.0, loss=lambda out, y: (out.squeeze(-1) * y).mean())
        trainer = pf.Trainer(max_steps=1, seed=SEED, progress=False, **plan)
        trainer.fit(model, (NUMBERS, torch.ones(8)), batch_size=8)
        found.append(whole_parameters(trainer))
    return found


def test_stages_may_have_other_dtypes(ranks: Any) -> None:
    """pytorch#186998, #196996: what gradients are added up in, over micro-batches and ranks, where dtypes are mixed."""
    cut = {"options": {"pipeline": {"stages": ["second"]}}}
    plans = [{"accumulate": 2}, {"accumulate": 4}, {"fsdp": 2, "accumulate": 2}]
    plans = [{"plan": pf.Plan(pp=2, **cut, **plan)} for plan in plans]
    for world_size, asked in ((2, plans[:2]), (4, plans[2:])):
        for results in ranks(world_size, mixed_dtypes, asked):
            for found in results:
                assert [value.dtype for value in found.values()] == [torch.float32, torch.bfloat16]
                for value in found.values():
                    torch.testing.assert_close(value.float(), -NUMBERS.mean(0, keepdim=True), rtol=0, atol=0)


class Drops(pf.Model):
    """Dropout of ones in each of four layers, noted."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Drop() for _ in range(4))
        self.configure(optimizer="sgd", lr=1.0, loss="mse")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Drop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = functional.dropout(torch.ones(64), 0.5)
        self.seen.append(mask)
        return self.linear(x) * mask[:1]


def dropped(plan: dict[str, Any]) -> list[torch.Tensor]:
    model = Drops()
    pf.Trainer(max_steps=1, seed=SEED, progress=False, **plan).fit(model, (torch.ones(8, 2),) * 2, batch_size=8)
    return [mask for layer in model.layers for mask in layer.seen]


def test_no_two_layers_replicas_or_micro_batches_drop_alike(ranks: Any) -> None:
    """pytorch#141220, #168375, slapo#21: stages with one seed dropped alike, and so did replicas of a stage."""
    found = [tuple(mask.tolist()) for masks in ranks(4, dropped, {"pp": 2, "dp": 2, "accumulate": 2}) for mask in masks]
    assert len(found) == 4 * 2 * 2  # layers, micro-batches, replicas
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("blocks", ["full", ("body",), ("body.0", "body.2")])
def test_what_is_recomputed_may_reach_over_stages(ranks: Any, blocks: Any) -> None:
    """A block that is cut, or of which one stage has the only one, is taken apart on all ranks alike."""
    expected = recomputed({})
    for found in ranks(2, recomputed, {"pp": 2, "accumulate": 2, "activation_checkpointing": blocks}):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def recomputed(plan: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential()
    model.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    pf.configure(model, optimizer="sgd", lr=1.0, loss="cross_entropy")
    trainer = pf.Trainer(max_epochs=1, seed=SEED, progress=False, **plan)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(2))
    trainer.fit(model, (x, torch.arange(8) % 3), batch_size=4)
    return {name: whole(value) for name, value in whole_parameters(trainer).items()}
