"""cpu_offload: the optimizer on the host trains alike; units are chosen as asked."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paraflow as pf
from paraflow.plugins import CPUOffload
from paraflow.plugins.cpu_offload import chosen_units
from paraflow.plugins.units import Unit
from tests.parity.runs import assert_same, by_hand, by_trainer
from tests.parity.tasks import CASES
from tests.plugins.offload_runs import BATCH, COUNT, assert_equal, resumed, scheduled, state_after

OFFLOAD = {"cpu_offload": "optimizer"}


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"clip_norm": 0.2},
        {"accumulate": 2},
        {"precision": "fp16"},
        {"precision": "bf16", "optimizer_implementation": "foreach"},
        {"optimizer_implementation": "fused", "apply_groups": 3, "clip_norm": 0.2},
        {"apply_groups": 2, "precision": "fp16"},
        {"apply_groups": "backward"},
    ],
    ids=str,
)
def test_the_optimizer_on_the_host_trains_alike(plan: dict[str, Any]) -> None:
    without = {key: value for key, value in plan.items() if key != "apply_groups"}
    assert_equal(scheduled(**OFFLOAD, **plan), scheduled(**without))


def test_what_the_optimizer_holds_is_apart_from_the_model() -> None:
    case, model = CASES["classification"], CASES["classification"].model()
    trainer = pf.Trainer(max_steps=2, progress=False, **OFFLOAD)
    trainer.fit(model, case.data(COUNT), batch_size=BATCH)
    held = trainer.engine.update.held
    assert all(one.is_copy and one.tensor.device.type == "cpu" for one in held)
    assert all(one.tensor.grad is None for one in held)
    for one in held:
        torch.testing.assert_close(one.tensor, one.parameter.detach(), rtol=0, atol=0)


@pytest.mark.parametrize("groups", [1, 3])
def test_replicas_train_alike(ranks: Any, groups: int) -> None:
    reference = by_hand("classification", COUNT, BATCH, clip_norm=0.2)
    plan = {**OFFLOAD, "apply_groups": groups, "clip_norm": 0.2}
    for measured in ranks(2, by_trainer, "classification", COUNT, BATCH, **plan):
        assert_same(measured, reference)


@pytest.mark.parametrize("groups", [1, 3, "backward"])
@pytest.mark.parametrize("what", ["optimizer", "params", 0.5, None])
def test_shards_train_alike(ranks: Any, groups: Any, what: Any) -> None:
    clip = float("inf") if groups == "backward" else 0.2
    reference = by_hand("classification", COUNT, BATCH, clip_norm=clip)
    plan = {"cpu_offload": what, "apply_groups": groups, "fsdp": 2, "clip_norm": None if groups == "backward" else clip}
    for measured in ranks(2, whole_of, plan):
        for name, parameter in reference.parameters.items():
            torch.testing.assert_close(measured[name], parameter, rtol=1e-5, atol=1e-6)


def whole_of(plan: dict[str, Any]) -> dict[str, torch.Tensor]:
    from paraflow.parts import whole

    return {name: whole(value).clone() for name, value in state_after(**plan)["model"].items()}


def half_on_shards(folder: str, first: dict[str, Any], second: dict[str, Any]) -> dict[str, torch.Tensor]:
    from paraflow.parts import whole

    state = resumed(Path(folder), first, second, half=True)
    assert state["optimizer"]["state"].keys() == state["model"].keys()
    masters = {name: values["master_weight"] for name, values in state["optimizer"]["state"].items()}
    for name, value in state["model"].items():
        torch.testing.assert_close(whole(masters[name]).to(torch.bfloat16), whole(value), rtol=0, atol=0)
    return {name: whole(value).clone() for name, value in masters.items()}


def test_masters_of_shards_are_saved_and_any_plan_goes_on_with_them(ranks: Any, tmp_path: Path) -> None:
    sharded = {**OFFLOAD, "fsdp": 2}
    one = ranks(2, half_on_shards, str(tmp_path / "one"), sharded, sharded)
    other = ranks(2, half_on_shards, str(tmp_path / "other"), sharded, {**sharded, "apply_groups": 3})
    assert_equal(other, one)
    assert_equal(one[1], one[0])
    assert next(iter(one[0].values())).dtype == torch.float32


@pytest.mark.parametrize(("first", "second"), [({}, OFFLOAD), (OFFLOAD, {}), (OFFLOAD, OFFLOAD)])
def test_either_goes_on_from_the_other(tmp_path: Path, first: dict[str, Any], second: dict[str, Any]) -> None:
    assert_equal(resumed(tmp_path, first, second), state_after())


def half_state(**plan: Any) -> dict[str, Any]:
    case = CASES["classification"]
    x, y = case.data(COUNT)
    trainer = pf.Trainer(max_epochs=2, seed=5, progress=False, **plan)
    trainer.fit(case.model().to(torch.bfloat16), (x.to(torch.bfloat16), y), batch_size=BATCH)
    return trainer.engine.state_dict()


def test_half_parameters_have_masters_and_a_run_goes_on_with_them(tmp_path: Path) -> None:
    ended = resumed(tmp_path, OFFLOAD, {**OFFLOAD, "apply_groups": 3}, half=True)
    assert_equal(ended, half_state(**OFFLOAD))
    for name, weight in ended["model"].items():
        master = ended["optimizer"]["state"][name]["master_weight"]
        assert master.dtype == torch.float32
        torch.testing.assert_close(master.to(torch.bfloat16), weight, rtol=0, atol=0)
        assert not torch.equal(master, weight.float())
    resumed(tmp_path, OFFLOAD, {}, half=True)  # without offload they are left out


class Clamps(pf.Callback):
    """Bounds the weights, as the critic of a Wasserstein GAN has it."""

    def on_after_optimizer_step(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        for parameter in trainer.engine.parameters:
            parameter.data.clamp_(-0.2, 0.2)


@pytest.mark.parametrize("make", [lambda: Clamps(), lambda: pf.callbacks.EMA(0.5, swap_at_end=True)])
def test_callbacks_that_change_weights_are_followed(make: Any) -> None:
    assert_equal(scheduled([make()], **OFFLOAD, apply_groups=2), scheduled([make()]))


@pytest.mark.filterwarnings("ignore:The loss of the epoch")
@pytest.mark.parametrize("plan", [OFFLOAD, {**OFFLOAD, "apply_groups": 3}, {"apply_groups": 3}], ids=str)
def test_a_step_that_nan_guard_drops_changes_nothing(plan: dict[str, Any]) -> None:
    case = CASES["classification"]
    x, y = case.data(COUNT)
    x[-1, 0] = float("nan")
    results = []
    for options in (plan, {}):
        guard = pf.callbacks.NaNGuard(action="stop")
        trainer = pf.Trainer(max_epochs=2, seed=5, progress=False, callbacks=[guard], **options)
        with pytest.warns(UserWarning, match="not finite"):
            trainer.fit(case.model(), (x, y), batch_size=BATCH)
        results.append(trainer.engine.state_dict())
    assert_equal(*results)
    assert all(bool(value.isfinite().all()) for value in results[0]["model"].values())


def test_a_dry_run_leaves_the_copies_as_they_were() -> None:
    assert_equal(scheduled(dry_run=True, **OFFLOAD), scheduled(dry_run=True))


def test_the_plan_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert "optimizer state and master weights on the host" in CPUOffload().describe()
    assert "40%" in CPUOffload(0.4).describe()
    assert "blocks.*" in CPUOffload(["blocks.*"]).describe()
    assert CPUOffload(["blocks.*"]).fields == {"cpu_offload": ("blocks.*",)}
    with pytest.raises(pf.PlanError, match="cpu_offload must be"):
        CPUOffload("gpu")


class Blocks(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4)) for _ in range(count))
        self.head = nn.Linear(4, 4)


def units_of(count: int) -> list[Unit]:
    model = Blocks(count)
    return [
        *(Unit(f"blocks.{index}", 100, block) for index, block in enumerate(model.blocks)),
        Unit("", 60, model),
    ]


def test_units_by_fraction_are_close_to_it_and_evenly_spread() -> None:
    units = units_of(20)[:-1]
    for tenths in range(1, 11):
        chosen = chosen_units(units, tenths / 10)
        assert len(chosen) == 2 * tenths
    half = sorted(int(name.split(".")[1]) for name in chosen_units(units, 0.5))
    assert {b - a for a, b in pairwise(half)} == {2}
    assert len(chosen_units(units, 0.001)) == 1
    assert chosen_units(units_of(3), 1.0) == {"blocks.0", "blocks.1", "blocks.2", ""}
    uneven = [Unit(str(index), size, nn.Linear(1, 1)) for index, size in enumerate((10, 900, 10, 80))]
    assert chosen_units(uneven, 0.08) == {"3"}


def test_units_by_pattern() -> None:
    units = units_of(3)
    assert chosen_units(units, "params") == {"blocks.0", "blocks.1", "blocks.2", ""}
    assert chosen_units(units, ("blocks.1",)) == {"blocks.1"}
    assert chosen_units(units, ("blocks",)) == {"blocks.0", "blocks.1", "blocks.2"}
    assert chosen_units(units, ("blocks.[02].0", "head")) == {"blocks.0", "blocks.2", ""}
    assert chosen_units(units, ("*",)) == {"blocks.0", "blocks.1", "blocks.2", ""}
    with pytest.raises(
        pf.PlanError, match=r"\[offload-pattern\].*'layers\.\*'.*modules that have some are: embed, blocks, blocks.0,"
    ):
        chosen_units(units, ("layers.*",))
