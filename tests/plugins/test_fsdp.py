"""Sharded models: what a user's model may do, what an optimizer may be, and what is refused by name."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import paraflow as pf
from paraflow.parts import is_spread, local, whole
from paraflow.plugins import FSDP

Trained = tuple[list[tuple[float, float]], dict[str, torch.Tensor]]


def samples(count: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, 6, generator=generator), torch.randint(0, 4, (count,), generator=generator)


class Plain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(6, 6, bias=False), nn.Linear(6, 6), nn.Linear(6, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Adapted(nn.Module):
    """Frozen blocks with a small part beside them that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.down, self.up, self.out = nn.Linear(6, 2, bias=False), nn.Linear(2, 4, bias=False), nn.Linear(6, 4)
        self.blocks.requires_grad_(False)
        self.out.requires_grad_(False)
        self.down.weight.data = self.down.weight.data.t().contiguous().t()  # another order in memory

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x) + self.up(self.down(x))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.block(torch.tanh(self.block(torch.tanh(self.first(x)))))))


class Tiny(nn.Module):
    """Seven numbers: some ranks hold none."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.ones(1)), nn.Linear(6, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight(x) * self.scale * torch.tensor([1.0, -1.0, 0.5, 2.0])


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.never, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.also_never = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.full((6,), 0.1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.first(x + self.shift)))


MODELS: dict[str, Callable[[], nn.Module]] = {c.__name__: c for c in (Plain, Tied, Adapted, Twice, Tiny, Unused)}


class Numbers(pf.Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.seen.append((logs["loss"], logs["grad_norm"]))


def trained(
    make: Callable[[], nn.Module], plugins: tuple[Any, ...] = (), optimizer: Any = "adamw", **plan: Any
) -> Trained:
    torch.manual_seed(1)
    model, numbers = make(), Numbers()
    options = {"weight_decay": 0.1} if optimizer == "adamw" else {}
    chosen = optimizer(model) if callable(optimizer) else optimizer
    pf.configure(model, loss="cross_entropy", optimizer=chosen, lr=1e-2, **options)
    trainer = pf.Trainer(
        max_steps=3, seed=5, progress=False, callbacks=[numbers], plugins=plugins, clip_norm=math.inf, **plan
    )
    trainer.fit(model, samples(), batch_size=12)
    assert type(trainer.engine.module) is type(model)
    assert type(model) is make
    return numbers.seen, {name: whole(v).clone() for name, v in trainer.engine.state_dict()["model"].items()}


def assert_alike(mine: Trained, reference: Trained, bound: float = 1e-5) -> None:
    torch.testing.assert_close(mine[0], reference[0], rtol=bound, atol=1e-6)
    assert mine[1].keys() == reference[1].keys()
    for name, value in reference[1].items():
        torch.testing.assert_close(mine[1][name], value, rtol=bound, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def every_model(degree: int, arguments: dict[str, Any], **plan: Any) -> dict[str, Trained]:
    return {name: trained(make, (FSDP(degree, **arguments),), **plan) for name, make in MODELS.items()}


@pytest.mark.parametrize(
    ("world_size", "arguments", "plan"),
    [(2, {}, {}), (4, {"zero": 2}, {}), (2, {"reduce": "last"}, {"accumulate": 3})],
)
def test_every_model_trains_as_in_one_process(
    ranks: Any, world_size: int, arguments: dict[str, Any], plan: dict[str, Any]
) -> None:
    got = ranks(world_size, every_model, world_size, arguments, **plan)[0]
    for name, make in MODELS.items():
        assert_alike(got[name], trained(make))


def by_optimizers(degree: int) -> dict[str, Trained]:
    plugins = (FSDP(degree),) if degree > 1 else ()
    made = {name: trained(Plain, plugins, name) for name in ("sgd", "adamw", "adagrad", "rmsprop")}
    made["made before"] = trained(Plain, plugins, lambda model: torch.optim.Adam(model.parameters(), lr=1e-2))
    made["groups"] = trained(
        Plain,
        plugins,
        lambda model: torch.optim.SGD(
            [{"params": [p]} for p in model.parameters() if p.dim() > 1]
            + [{"params": [p for p in model.parameters() if p.dim() == 1], "lr": 0.1}],
            lr=1e-2,
            momentum=0.9,
        ),
    )
    made["fused"] = trained(Plain, plugins, optimizer_implementation="fused")
    return made


def test_optimizers_hold_plain_shards(ranks: Any) -> None:
    reference = by_optimizers(1)
    got = ranks(2, by_optimizers, 2)[0]
    for name, alone in reference.items():
        assert_alike(got[name], alone)


class Mixed(nn.Module):
    """Each rank's loss depends on another of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.either = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.first, self.out = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = [layer(torch.tanh(self.first(x))) for layer in self.either]
        return self.out(torch.tanh(both[int(os.environ.get("RANK", 0))]))


class Experts(Mixed):
    """Each rank runs another of two layers."""

    all_alike = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.all_alike -= 1
        expert = self.either[0 if self.all_alike >= 0 else int(os.environ["RANK"])]
        return self.out(torch.tanh(expert(torch.tanh(self.first(x)))))


def mixed_ranks(shards: bool) -> list[Trained]:
    if not shards:
        return [trained(Mixed, (pf.plugins.DataParallel(2, find_unused_parameters=True),))]
    arguments = [{}, {"units": ["first"]}, {"zero": 2}]
    got = [trained(Mixed, (FSDP(2, find_unused_parameters=True, **more),)) for more in arguments]
    units = FSDP(2, units=["first", "out"], find_unused_parameters=True)
    return [*got, trained(Experts, (units,))]


def test_ranks_may_use_different_parameters(ranks: Any) -> None:
    reference = ranks(2, mixed_ranks, False)[0][0]
    for got in ranks(2, mixed_ranks, True)[0]:
        assert_alike(got, reference)


def changed_in_place(zero: int) -> None:
    torch.manual_seed(1)
    model = Plain()
    model.register_parameter("of_the_whole", nn.Parameter(torch.ones(4)))
    pf.configure(model, loss="cross_entropy", optimizer="adamw", lr=1e-2)
    trainer = pf.Trainer(max_steps=2, seed=5, progress=False, fsdp=2, zero=zero)
    trainer.fit(model, samples(), samples(), batch_size=12)
    trainer.evaluate(model, samples(), batch_size=12)
    trainer.engine.forward(samples(2))  # with gradients and no backward: units stay gathered
    trainer.fit(model, samples(), batch_size=12)
    assert all(is_spread(parameter) for parameter in model.parameters())
    for parameter in trainer.engine.parameters:
        local(parameter).detach().zero_()
    assert trainer.evaluate(model, samples(), batch_size=12)["loss"] == pytest.approx(math.log(4))
    assert not trainer.predict(model, samples()[0]).any()


@pytest.mark.parametrize("zero", [1, 3])
def test_what_was_gathered_is_never_stale(ranks: Any, zero: int) -> None:
    ranks(2, changed_in_place, zero)


def second_trainer(first: dict[str, Any], second: dict[str, Any]) -> str:
    torch.manual_seed(1)
    model = Plain()
    pf.configure(model, loss="cross_entropy", optimizer="adamw", lr=1e-2)
    pf.Trainer(max_steps=2, seed=5, progress=False, **first).fit(model, samples(), batch_size=12)
    try:
        pf.Trainer(max_steps=2, seed=5, progress=False, **second).fit(model, samples(), batch_size=12)
    except pf.ModelError as error:
        return str(error)
    return "trained"


def test_a_sharded_model_is_taken_up_by_a_plan_that_fits(ranks: Any) -> None:
    assert ranks(2, second_trainer, {"fsdp": 2}, {"fsdp": 2, "zero": 1}) == ["trained"] * 2
    for message in ranks(2, second_trainer, {"fsdp": 2}, {"dp": 2}):
        assert "Plain has been spread over ranks by an earlier Trainer, and this plan (dp=2) takes it whole" in message
    for message in ranks(2, second_trainer, {"fsdp": 2}, {"fsdp": 2, "comm_hook": "bf16"}):
        assert "sharded by an earlier Trainer: 2 ranks and 2 units. This one would have 2 ranks" in message


class Statistics(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def statistics_of(plugin: str) -> torch.Tensor:
    given = (FSDP(2),) if plugin == "fsdp" else (pf.plugins.DataParallel(2),)
    return trained(Statistics, given)[1]["1.running_mean"]


def test_running_statistics_are_those_of_replicas(ranks: Any) -> None:
    torch.testing.assert_close(ranks(2, statistics_of, "fsdp")[0], ranks(2, statistics_of, "dp")[0])


def trained_after(seed: int, where: Any) -> None:
    pf.seed(seed)
    with where:
        model = nn.Sequential(nn.Linear(6, 1024), nn.Linear(1024, 4))
    pf.configure(model, loss="cross_entropy", optimizer="sgd")
    pf.Trainer(max_steps=1, seed=5, progress=False, fsdp=2).fit(model, samples(), batch_size=12)


def seeds_differ() -> list[torch.Tensor]:
    torch.manual_seed(int(os.environ["RANK"]))
    model = Plain()
    pf.configure(model, loss="cross_entropy", optimizer="sgd", lr=1e-30)
    trainer = pf.Trainer(max_steps=1, seed=5, progress=False, fsdp=2)
    trainer.fit(model, samples(), batch_size=12)
    with pytest.raises(pf.ModelError, match=r"^0\.weight has no value yet, and the ranks were seeded differently"):
        trained_after(int(os.environ["RANK"]), pf.deferred_init())
    with pytest.raises(pf.ModelError, match=r"Call pf\.seed\(0\) before building it"):
        trained_after(int(os.environ["RANK"]), torch.device("meta"))
    trained_after(0, pf.deferred_init())
    torch.manual_seed(0)
    return [whole(mine) - theirs for mine, theirs in zip(model.parameters(), Plain().parameters(), strict=True)]


def test_every_rank_starts_from_the_first_ranks_parameters(ranks: Any) -> None:
    for differences in ranks(2, seeds_differ):
        assert not any(difference.any() for difference in differences)


@pytest.mark.parametrize(
    ("given", "plan", "rule", "sentence"),
    [
        ((FSDP(),), {}, "fsdp-without-degree", r"nothing would be sharded.*FSDP\(2\) or fsdp=2"),
        ((pf.plugins.DataParallel(1),), {"fsdp": 2}, "fsdp-is-data-parallel", "Leave DataParallel out"),
        ((FSDP(2, gather_dtype="bf16"),), {}, "fsdp-gather-dtype", "Write precision='bf16' too"),
        ((FSDP(2, reduce="last"),), {"comm_hook": "bf16", "accumulate": 2}, "fsdp-comm-hook", "reduce='each'"),
        ((FSDP(2, reshard_after_forward=2),), {}, "fsdp-reshard-divides", "must divide fsdp=2"),
        ((), {"fsdp": 4}, "degrees-divide-world", "takes 4 ranks, which does not divide the world of 2"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_before_launch(
    monkeypatch: Any, given: tuple[Any, ...], plan: dict[str, Any], rule: str, sentence: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(pf.PlanError, match=sentence) as caught:
        trained(Plain, given, **plan)
    assert caught.value.rule == rule


def test_arguments_of_another_kind_are_refused() -> None:
    with pytest.raises(pf.PlanError, match="reduce of FSDP must be one of 'each', 'last', not 'first'"):
        FSDP(2, reduce="first")  # type: ignore[arg-type]


def described() -> str:
    torch.manual_seed(1)
    model = Plain()
    pf.configure(model, loss="cross_entropy", optimizer="adamw")
    trainer = pf.Trainer(max_steps=1, progress=False, fsdp=2, accumulate=2)
    trainer.fit(model, samples(), batch_size=12)
    return next(plugin.describe() for plugin in trainer.engine.plugins if plugin.name == "fsdp")


def test_the_memory_of_each_kind_is_printed(ranks: Any) -> None:
    for line in ranks(2, described):
        assert "over 2 ranks, zero 3 in 2 units; of a rank: parameters 360 B, gathered 448 B at most" in line
        assert "next 360 B (reduce='each'; 720 B with 'last'); AdamW's state 720 B" in line


class Masked(Plain):
    """A mean over what is not masked, which is NaN where all is."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        kept = y != -100
        return {"loss": (self(x).square().mean(-1) * kept).sum() / kept.sum(), "weight": int(kept.sum())}


def nothing_to_average(reduce: str) -> str:
    x, y = samples(12)
    y[1:] = -100
    model = Masked()
    pf.configure(model, optimizer="adamw")
    trainer = pf.Trainer(max_steps=1, progress=False, accumulate=3, plugins=[FSDP(2, reduce=reduce)])  # type: ignore[arg-type]
    with pytest.raises(pf.ModelError) as caught:
        trainer.fit(model, (x, y), batch_size=12)
    return str(caught.value)


@pytest.mark.parametrize("reduce", ["each", "last"])
def test_the_gradient_of_nothing_is_refused(ranks: Any, reduce: str) -> None:
    for message in ranks(2, nothing_to_average, reduce):
        assert message.startswith("A micro-batch had 0 items, and the gradient of its mean loss is NaN.")
