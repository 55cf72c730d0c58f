"""apply_groups: groups and backward give what the ordinary step gives, or are refused with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paraflow as pf
from paraflow.errors import ModelError
from paraflow.plugins import ApplyGroups
from tests.parity.runs import assert_same, by_hand, by_trainer
from tests.parity.tasks import CASES, samples
from tests.plugins.offload_runs import BATCH, COUNT, assert_equal, resumed, scheduled, state_after


@pytest.mark.parametrize("groups", [2, 8])
@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"clip_norm": 0.2},
        {"accumulate": 2},
        {"precision": "fp16"},
        {"precision": "bf16", "optimizer_implementation": "foreach"},
        {"optimizer_implementation": "fused"},
    ],
    ids=str,
)
def test_groups_train_alike(groups: int, plan: dict[str, Any]) -> None:
    assert_equal(scheduled(apply_groups=groups, **plan), scheduled(**plan))


@pytest.mark.parametrize("plan", [{}, {"precision": "bf16"}, {"optimizer_implementation": "foreach"}], ids=str)
def test_backward_trains_alike(plan: dict[str, Any]) -> None:
    assert_equal(scheduled(apply_groups="backward", **plan), scheduled(**plan))


@pytest.mark.parametrize("name", ["token sums", "own loss", "token means"])
def test_backward_trains_alike_where_items_are_counted(name: str) -> None:
    assert_equal(state_after(name, apply_groups="backward"), state_after(name))


@pytest.mark.parametrize("groups", [3, 100])
def test_replicas_train_alike(ranks: Any, groups: int) -> None:
    reference = by_hand("classification", COUNT, BATCH, clip_norm=0.2)
    for measured in ranks(2, by_trainer, "classification", COUNT, BATCH, apply_groups=groups, clip_norm=0.2):
        assert_same(measured, reference)


@pytest.mark.parametrize("groups", [3, "backward"])
def test_replicas_of_shards_train_alike(ranks: Any, groups: Any) -> None:
    reference = state_after()["model"]
    for model in ranks(4, whole_model, {"dp": 2, "fsdp": 2, "apply_groups": groups}):
        for name, parameter in reference.items():
            torch.testing.assert_close(model[name], parameter, rtol=1e-5, atol=1e-6)


def whole_model(plan: dict[str, Any]) -> dict[str, torch.Tensor]:
    from paraflow.parts import whole

    return {name: whole(value).clone() for name, value in state_after(**plan)["model"].items()}


@pytest.mark.parametrize("first", [{}, {"apply_groups": 8}, {"apply_groups": "backward"}], ids=str)
@pytest.mark.parametrize("second", [{}, {"apply_groups": 8}, {"apply_groups": "backward"}], ids=str)
def test_any_division_goes_on_from_any_other(tmp_path: Path, first: dict[str, Any], second: dict[str, Any]) -> None:
    assert_equal(resumed(tmp_path, first, second), state_after())


@pytest.mark.parametrize("groups", [4, "backward"])
def test_averages_are_the_same(groups: Any) -> None:
    def averages(**plan: Any) -> Any:
        ema = pf.callbacks.EMA(0.9)
        scheduled([ema], **plan)
        return ema.state_dict()

    assert_equal(averages(apply_groups=groups), averages())


class Watches(pf.Callback):
    """Counts gradients after backward and before the optimizer."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_before_optimizer_step(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.seen.append(len(trainer.engine.gradients()))


def test_in_backward_gradients_are_freed_at_once_and_hooks_are_gone_after() -> None:
    watches, case = Watches(), CASES["classification"]
    model = case.model()
    alive: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in model.parameters()))
        )
    trainer = pf.Trainer(max_steps=3, seed=5, progress=False, apply_groups="backward", callbacks=[watches])
    trainer.fit(model, case.data(COUNT), batch_size=BATCH)
    assert watches.seen == [0, 0, 0]
    assert max(alive) == 1
    assert all(len(parameter._post_accumulate_grad_hooks) == 1 for parameter in model.parameters())


def refused(rule: str, model: nn.Module | None = None, **arguments: Any) -> str:
    case = CASES["classification"]
    with pytest.raises(pf.PlanError) as raised:
        pf.Trainer(max_steps=1, progress=False, **arguments).fit(
            case.model() if model is None else model, case.data(COUNT), batch_size=BATCH
        )
    assert raised.value.rule == rule
    assert f"[{rule}]" in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("rule", "plan"),
    [
        ("backward-apply-accumulate", {"accumulate": 2}),
        ("backward-apply-clip", {"clip_norm": 1.0}),
        ("backward-apply-fp16", {"precision": "fp16"}),
    ],
)
def test_backward_is_refused_by_name(rule: str, plan: dict[str, Any]) -> None:
    assert "apply_groups=8" in refused(rule, apply_groups="backward", **plan)
    assert "apply_groups=8" in refused(rule, plugins=[ApplyGroups("backward")], **plan)


def refused_replicas() -> str:
    return refused("backward-apply-replicas", apply_groups="backward")


def test_backward_is_refused_with_replicas(ranks: Any) -> None:
    for sentence in ranks(2, refused_replicas):
        assert "fsdp=2 instead of dp" in sentence


def test_nan_guard_refuses_backward() -> None:
    refused("backward-apply-nan-guard", apply_groups="backward", callbacks=[pf.callbacks.NaNGuard()])


def test_hooks_before_the_step_are_refused_in_backward() -> None:
    model = CASES["classification"].model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    model.configure(optimizer=optimizer, loss="cross_entropy")
    refused("backward-apply-hooks", model, apply_groups="backward")


class OverAll(torch.optim.SGD):
    """Scales by the norm over all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        torch.nn.utils.clip_grads_with_norm_(
            [p for group in self.param_groups for p in group["params"]], 1.0, torch.nn.utils.get_total_norm(gradients)
        )
        super().step()


@pytest.mark.parametrize("groups", [2, "backward"])
def test_an_optimizer_over_all_parameters_is_refused_by_name(groups: Any) -> None:
    model = CASES["classification"].model()
    model.configure(optimizer=OverAll(model.parameters(), lr=0.1), loss="cross_entropy")
    assert "OverAll" in refused("apply-groups-optimizer", model, apply_groups=groups)


class MeanOverNothing(pf.Model):
    """A mean over zero items, whose gradient is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 4)
        self.configure(optimizer="sgd", lr=0.1)

    def training_step(self, batch: Any) -> Any:
        x, _ = batch
        return {"loss": self.body(x).sum() / torch.zeros(()), "weight": 0}


@pytest.mark.parametrize("groups", [1, "backward"])
def test_the_gradient_of_nothing_is_refused_before_it_reaches_the_weights(groups: Any) -> None:
    model = MeanOverNothing()
    with pytest.raises(ModelError, match="0 items"):
        pf.Trainer(max_steps=1, progress=False, apply_groups=groups).fit(model, samples(COUNT), batch_size=BATCH)
    assert bool(model.body.weight.isfinite().all())


def test_another_trainer_trains_the_model_as_ever_after() -> None:
    results = []
    for first in ("backward", 1):
        case = CASES["classification"]
        model = case.model()
        for groups in (first, 1):
            trainer = pf.Trainer(max_epochs=1, seed=5, progress=False, apply_groups=groups)
            trainer.fit(model, case.data(COUNT), batch_size=BATCH)
        results.append(trainer.engine.state_dict())
    assert_equal(*results)


class RunsOut(nn.Module):
    """Runs out of memory on more than three samples."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 4)
        pf.configure(self, optimizer="sgd", lr=0.1, loss="cross_entropy")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 3:
            raise torch.OutOfMemoryError("out of memory")
        return self.body(x)


def test_micro_batches_that_auto_makes_are_refused_in_backward_and_run_in_groups() -> None:
    refused("backward-apply-accumulate", RunsOut(), apply_groups="backward", auto="O1")
    pf.Trainer(max_steps=1, progress=False, apply_groups=8, auto="O1").fit(RunsOut(), samples(COUNT), batch_size=BATCH)


@pytest.mark.parametrize("groups", [2, "backward"])
def test_debug_mode_trains_alike(groups: Any) -> None:
    assert_equal(scheduled(apply_groups=groups, debug=True), scheduled())
