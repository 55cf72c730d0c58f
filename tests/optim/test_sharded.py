"""Sharded models: optimizers that were made before, that somebody looks on at, or whose methods are not torch's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import paraflow as pf
from paraflow.parts import is_spread, whole
from tests.optim.test_kinds import BoundsEach
from tests.plugins.test_fsdp import Plain, samples

Weights = dict[str, torch.Tensor]

_NEAR_THE_LARGEST = 1.58e18  # of 90 numbers the squares have a sum that fp32 holds; of 180 they have not


def bound(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Bounds each gradient by its norm: of a shard it would be another."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.mul_((0.05 / parameter.grad.norm()).clamp(max=1))


def hooked(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(bound)
    return optimizer


def patched(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = optimizer.step

    def step(*arguments: Any) -> Any:
        bound(optimizer)
        return plain(*arguments)

    optimizer.step = step  # type: ignore[method-assign]
    return optimizer


def warm(model: nn.Module) -> torch.optim.Optimizer:
    """Has seen five steps already, of which the model is to know nothing."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(5):
        for parameter in model.parameters():
            parameter.grad = torch.linspace(0.1, step + 1, parameter.numel()).view_as(parameter)
        optimizer.step()
    model.load_state_dict(before)
    return optimizer


class Late(pf.Callback):
    """Registers a hook when the optimizer holds already what it holds."""

    def on_train_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        trainer.engine.optimizer.register_step_pre_hook(bound)


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def fitted(
    make: Callable[[nn.Module], Any], plan: dict[str, Any], callbacks: tuple[Any, ...] = (), runs: str = "f"
) -> Weights:
    """The weights after fits (f) and predictions (p), some by a new Trainer (" ")."""
    torch.manual_seed(1)
    model = Plain()
    pf.configure(model, loss="cross_entropy", optimizer=make(model))
    for part in runs.split():
        trainer = pf.Trainer(max_steps=3, seed=5, progress=False, callbacks=list(callbacks), **plan)
        for run in part:
            if run == "p":
                trainer.predict(model, samples()[0][:5])
            else:
                trainer.fit(model, samples(), batch_size=12)
    optimizer_state = trainer.engine.state_dict()["optimizer"]["state"]
    if "exp_avg" in optimizer_state.get("0.weight", {}):
        assert is_spread(optimizer_state["0.weight"]["exp_avg"]) == (plan.get("fsdp", 1) > 1)
    return {name: whole(value).clone() for name, value in trainer.engine.state_dict()["model"].items()}


def every_case(plan: dict[str, Any]) -> dict[str, Weights]:
    made = {make.__name__: fitted(make, plan) for make in (hooked, patched, warm)}
    made["overridden"] = fitted(lambda model: BoundsEach(model.parameters(), lr=0.1), plan)
    made["hooked late"] = fitted(plain, plan, (Late(),))
    made["state from the first"] = fitted(lambda m: torch.optim.Adagrad(m.parameters(), 0.1, 0, 0, 0.1), plan)
    made["twice, and by another"] = fitted(warm, plan, runs="pff f")
    made["seen by another before"] = fitted(warm, plan, runs="p f")
    return made


def norms_and_refusals() -> tuple[list[torch.Tensor], list[str]]:
    norms, said = [], []
    for dtype, size in ((torch.float32, _NEAR_THE_LARGEST), (torch.float64, 1e-3)):
        model = Plain().to(dtype)
        pf.configure(model, loss="cross_entropy", optimizer="sgd")
        trainer = pf.Trainer(max_steps=1, progress=False, fsdp=2)
        trainer.predict(model, samples()[0].to(dtype))
        for parameter in trainer.engine.parameters:
            parameter.grad = torch.full_like(parameter, size)
        norms.append(trainer.engine.gradient_norm())
    model[2] = nn.Linear(16, 4, dtype=dtype)
    try:
        trainer.predict(model, samples()[0].to(dtype))
    except pf.ModelError as error:
        said.append(str(error))
    try:
        fitted(hooked, {"fsdp": 2, "cpu_offload": "optimizer"})
    except pf.PlanError as error:
        said.append(str(error))
    try:
        fitted(plain, {"fsdp": 2, "cpu_offload": "optimizer"}, (Late(),))
    except pf.PlanError as error:
        said.append(str(error))
    return norms, said


def test_any_optimizer_trains_shards_as_it_trains_the_whole(ranks: Any) -> None:
    reference, got = every_case({}), ranks(2, every_case, {"fsdp": 2})[0]
    for name, weights in reference.items():
        for key, value in weights.items():
            torch.testing.assert_close(got[name][key], value, rtol=1e-5, atol=1e-6, msg=f"{name}: {key}")


def test_an_optimizer_on_the_host_is_taken_up_by_another_trainer() -> None:
    for runs in ("ff", "f f", "p f"):
        got, reference = fitted(warm, {"cpu_offload": "optimizer"}, runs=runs), fitted(warm, {}, runs=runs)
        for key, value in reference.items():
            assert torch.equal(got[key], value), key


def test_norms_are_exact_and_what_cannot_be_is_refused(ranks: Any) -> None:
    count = sum(parameter.numel() for parameter in Plain().parameters())
    for norms, said in ranks(2, norms_and_refusals):
        assert [norm.dtype for norm in norms] == [torch.float32, torch.float64]
        assert math.isclose(float(norms[0]), _NEAR_THE_LARGEST * count**0.5, rel_tol=1e-6)
        assert math.isclose(float(norms[1]), 1e-3 * count**0.5, rel_tol=1e-14)
        assert "Plain was changed (frozen, unfrozen, configured anew or given other parameters)" in said[0]
        assert all("[offload-whole-parameters] SGD" in sentence for sentence in said[1:])
        assert len(said) == 3
