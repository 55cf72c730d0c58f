"""An optimizer applied in groups, in backward or to copies gives what one step over everything gives, to the bit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paraflow.optim.host_link import Fetched
from paraflow.optim.rehearsal import steps_by_parameter
from paraflow.optim.shares import shares_of
from paraflow.optim.state import load_optimizer_state, optimizer_state
from paraflow.optim.stepping import Narrow
from paraflow.optim.update import Held, Update
from tests.plugins.offload_runs import assert_equal

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw for-loop": lambda groups: torch.optim.AdamW(groups, lr=0.1, foreach=False),
    "adamw for-each": lambda groups: torch.optim.AdamW(groups, lr=0.1, foreach=True, amsgrad=True),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, lr=0.1, fused=True),
    "adamw tensor lr": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.1), foreach=False),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, centered=True, momentum=0.5),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.1),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.1),
    "asgd": lambda groups: torch.optim.ASGD(groups, lr=0.1, t0=1),
}


class CountsInGroup(torch.optim.Optimizer):
    """Keeps the number of steps in its groups, from the first on, and a history in a list."""

    def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})
        for group in self.param_groups:
            group.update(history=[], total=torch.zeros(()))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["history"].append(group["count"])
            group["total"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * group["lr"] / group["count"] / group["total"])


class BoundsNorm(CountsInGroup):
    """Scales by the norm over all parameters, as LAMB of apex does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient.mul_(torch.clamp(1 / norm, max=1.0))
        super().step()


class CountsOverGroups(CountsInGroup):
    """Counts in a tensor that its groups share."""

    def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["total"] = self.param_groups[0]["total"]


OPTIMIZERS["counts in group"] = CountsInGroup


def model() -> nn.Module:
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 2))
    layers[2].bias.requires_grad_(False)
    return layers


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    parameters = list(module.parameters())
    return [
        {"params": [p for p in parameters if p.dim() == 2], "lr": 0.05},
        {"params": [p for p in parameters if p.dim() == 1]},
    ]


def made(make: Make, module: nn.Module | None = None) -> tuple[nn.Module, Update]:
    module = model() if module is None else module
    return module, Update(make(groups_of(module)), dict(module.named_parameters()))


def on_host(held: Held) -> torch.Tensor:
    """A copy; on a machine without a device it is a copy beside the parameter."""
    own = held.parameter.detach()
    return own.to(torch.float32, copy=True) if own.requires_grad or held.parameter.requires_grad else held.tensor


def backward(module: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    dtype = next(module.parameters()).dtype
    x = torch.randn(4, 5, generator=generator).to(dtype)
    for parameter in module.parameters():
        parameter.grad = None
    used: nn.Module = module[:5] if step % 3 == 1 else module  # the last layer is left out sometimes
    used(x).square().sum().backward()


def train(module: nn.Module, update: Update, steps: range) -> None:
    for step in steps:
        backward(module, step)
        update()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("copies", [False, True], ids=["itself", "copies"])
def test_groups_give_what_one_step_gives(name: str, copies: bool) -> None:
    reference, plain = made(OPTIMIZERS[name])
    train(reference, plain, range(5))
    for count in (1, 2, 3, 8, 100):
        module, update = made(OPTIMIZERS[name])
        update.divide(count)
        if copies:
            update.hold(on_host)
        train(module, update, range(5))
        assert_equal(module.state_dict(), reference.state_dict())
        assert_equal(optimizer_state(update), optimizer_state(plain))
        assert [len(group["params"]) for group in update.optimizer.param_groups] == [4, 4]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("copies", [False, True], ids=["itself", "copies"])
def test_backward_gives_what_one_step_gives(name: str, copies: bool) -> None:
    reference, plain = made(OPTIMIZERS[name])
    train(reference, plain, range(5))
    module, update = made(OPTIMIZERS[name])
    if copies:
        update.hold(on_host)
    for held in update.held:
        if held.parameter.requires_grad:
            held.parameter.register_post_accumulate_grad_hook(lambda _, held=held: update.apply_now(held))
    for step in range(5):
        backward(module, step)
        assert all(parameter.grad is None for parameter in module.parameters())
        update()
    assert_equal(module.state_dict(), reference.state_dict())
    assert_equal(optimizer_state(update), optimizer_state(plain))


@pytest.mark.parametrize("name", ["sgd", "adamw fused", "adamw for-each", "nadam", "counts in group"])
@pytest.mark.parametrize(("first", "second"), [(1, 8), (8, 1), (2, 3)])
def test_state_of_one_division_is_taken_up_by_another(name: str, first: int, second: int) -> None:
    reference, plain = made(OPTIMIZERS[name])
    train(reference, plain, range(6))
    module, update = made(OPTIMIZERS[name])
    update.divide(first)
    train(module, update, range(3))
    saved, weights = copy.deepcopy(optimizer_state(update)), copy.deepcopy(module.state_dict())
    module, update = made(OPTIMIZERS[name])
    update.divide(second)
    update.hold(on_host)
    module.load_state_dict(weights)
    load_optimizer_state(update, saved)
    train(module, update, range(3, 6))
    assert_equal(module.state_dict(), reference.state_dict())
    assert_equal(optimizer_state(update), optimizer_state(plain))


def test_groups_are_balanced_whole_and_in_order() -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in (9, 1, 2, 3, 8, 0, 4)]
    held = [Held(str(index), p, p) for index, p in enumerate(parameters)]
    for count in range(1, 12):
        shares = shares_of(held, count)
        assert [one.name for share in shares for one in share] == list("0123456")
        assert len(shares) <= count
        assert all(shares)
    assert max(sum(one.bytes for one in share) for share in shares_of(held, 3)) == 12 * 4
    assert max(sum(one.bytes for one in share) for share in shares_of(held, 7)) == 9 * 4


def test_hooks_and_schedule_see_one_step_with_all_its_gradients() -> None:
    seen: list[Any] = []

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        seen.append(("before", sum(p.grad is not None for p in parameters)))
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.01, 0.01)

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        seen.append(("after", len([p for group in optimizer.param_groups for p in group["params"]])))

    results = []
    for count, copies in ((1, False), (3, False), (3, True), (1, True)):
        module, update = made(OPTIMIZERS["adamw for-each"])
        optimizer = update.optimizer
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            optimizer.register_step_pre_hook(before)
            optimizer.register_step_post_hook(after)
            update.divide(count)
            if copies:
                update.hold(on_host)
            for step in range(3):
                train(module, update, range(step, step + 1))
                schedule.step()
        results.append(module.state_dict())
        assert seen == [("before", 7), ("after", 8), ("before", 5), ("after", 8), ("before", 7), ("after", 8)]
        seen.clear()
    for result in results[1:]:
        assert_equal(result, results[0])


def test_a_schedule_does_not_warn_and_the_profiler_sees_one_step() -> None:
    module, update = made(OPTIMIZERS["adamw fused"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule = torch.optim.lr_scheduler.StepLR(update.optimizer, 1, 0.5)
        update.divide(4)
        with torch.profiler.profile() as profile:
            train(module, update, range(1))
        schedule.step()
    steps = [event for event in profile.events() if event.name.startswith("Optimizer.step#")]
    assert [event.name for event in steps] == ["Optimizer.step#AdamW.step"]


def test_an_error_in_the_middle_leaves_groups_and_hooks_whole() -> None:
    module, update = made(OPTIMIZERS["adamw for-loop"])
    optimizer = update.optimizer
    optimizer.register_step_post_hook(lambda *_: None)
    update.divide(3)
    backward(module, 0)
    last = update.held[-1].parameter
    optimizer.state[last] = {"step": None}
    groups, whole = optimizer.param_groups, [list(group["params"]) for group in optimizer.param_groups]
    with pytest.raises(Exception):  # noqa: B017
        update()
    assert optimizer.param_groups is groups
    for group, parameters in zip(groups, whole, strict=True):
        assert all(one is other for one, other in zip(group["params"], parameters, strict=True))
    assert len(optimizer._optimizer_step_post_hooks) == 1


def test_nothing_held_and_one_group_is_the_optimizers_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    module, update = made(OPTIMIZERS["sgd"])

    def fail(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(Narrow, "__init__", fail)
    monkeypatch.setattr(Fetched, "give", fail)
    train(module, update, range(2))


def test_only_optimizers_that_step_parameter_by_parameter_are_divided() -> None:
    parameters = lambda: [{"params": [torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(3))]}]  # noqa: E731
    for make in OPTIMIZERS.values():
        assert steps_by_parameter(make(parameters()))
    assert not steps_by_parameter(torch.optim.LBFGS([torch.nn.Parameter(torch.ones(2))]))
    assert not steps_by_parameter(CountsOverGroups(parameters() + parameters()))
    bounded = BoundsNorm(parameters())
    assert not steps_by_parameter(bounded)
    assert not bounded.state
    assert bounded.param_groups[0]["history"] == []
    assert_equal(bounded.param_groups[0]["params"][0].detach(), torch.ones(3, 2))


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.detach().mul_(0.5),
        lambda weight: weight.data.clamp_(-0.1, 0.1),
        lambda weight: setattr(weight, "data", weight.data.flip(0).clone()),
    ],
    ids=["in place", "through data", "other memory"],
)
def test_weights_that_somebody_changed_are_taken_up(change: Callable[[torch.Tensor], Any]) -> None:
    results = []
    for copies in (False, True):
        module, update = made(OPTIMIZERS["adamw for-each"])
        if copies:
            update.hold(on_host)
        for step in range(4):
            train(module, update, range(step, step + 1))
            change(module[0].weight)
        results.append(module.state_dict())
    assert_equal(results[1], results[0])


def by_hand_with_masters(steps: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """bf16 weights that are rounded from fp32 ones, which AdamW updates by the bf16 gradients."""
    module = model().to(torch.bfloat16)
    masters = {n: p.detach().float() if p.requires_grad else p for n, p in module.named_parameters()}
    names = dict(zip(map(id, module.parameters()), masters, strict=True))
    groups = [{**g, "params": [masters[names[id(p)]] for p in g["params"]]} for g in groups_of(module)]
    optimizer = OPTIMIZERS["adamw for-each"](groups)
    for step in range(steps):
        backward(module, step)
        for name, parameter in module.named_parameters():
            masters[name].grad = None if parameter.grad is None else parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(masters[name])
    return module, masters


@pytest.mark.parametrize("count", [1, 3])
def test_half_parameters_have_fp32_masters_that_are_saved(count: int) -> None:
    reference, masters = by_hand_with_masters(6)
    module, update = made(OPTIMIZERS["adamw for-each"], model().to(torch.bfloat16))
    update.divide(count)
    update.hold(on_host)
    train(module, update, range(3))
    assert optimizer_state(update)["state"]["0.weight"]["master_weight"].dtype == torch.float32
    saved, weights = copy.deepcopy(optimizer_state(update)), copy.deepcopy(module.state_dict())
    module, update = made(OPTIMIZERS["adamw for-each"], model().to(torch.bfloat16))
    update.hold(on_host)
    module.load_state_dict(weights)
    load_optimizer_state(update, saved)
    for step in range(3, 6):
        kept = [parameter.detach().clone() for parameter in module.parameters()]
        with torch.no_grad():  # what puts averages into the model for a validation, and takes them out
            for parameter in module.parameters():
                parameter.mul_(2)
            for parameter, value in zip(module.parameters(), kept, strict=True):
                parameter.copy_(value)
        train(module, update, range(step, step + 1))
    assert_equal(module.state_dict(), reference.state_dict())
    for held in update.held:
        assert_equal(held.tensor.detach(), masters[held.name].detach())


def test_a_ready_made_optimizer_of_an_earlier_run_holds_parameters_again() -> None:
    reference, plain = made(OPTIMIZERS["adamw for-loop"])
    train(reference, plain, range(4))
    module, update = made(OPTIMIZERS["adamw for-loop"])
    update.hold(on_host)
    train(module, update, range(2))
    again = Update(update.optimizer, dict(module.named_parameters()))
    assert all(held.is_itself for held in again.held)
    train(module, again, range(2, 4))
    assert_equal(module.state_dict(), reference.state_dict())
    assert_equal(optimizer_state(again), optimizer_state(plain))


def test_a_second_gradient_in_one_backward_is_refused() -> None:
    module, update = made(OPTIMIZERS["sgd"])
    backward(module, 0)
    update.apply_now(update.held[0])
    with pytest.raises(RuntimeError, match=r"'0\.weight' was given a gradient twice"):
        update.apply_now(update.held[0])


def transient(count: int, copies: bool) -> int:
    """The most bytes that a step has allocated at a time, beyond what is there before."""
    layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(24))
    update = Update(torch.optim.AdamW(layers.parameters(), foreach=True), dict(layers.named_parameters()))
    update.divide(count)
    if copies:
        update.hold(on_host)
    for _ in range(2):  # the first makes the state
        for parameter in layers.parameters():
            parameter.grad = torch.ones_like(parameter)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            update()
    used = most = 0
    results: Any = profile.profiler.kineto_results
    for event in results.events():
        if event.name() == "[memory]":
            used += event.nbytes()
            most = max(most, used)
    return most


@pytest.mark.parametrize("copies", [False, True], ids=["itself", "copies"])
def test_eight_groups_take_an_eighth_of_the_memory_of_a_step(copies: bool) -> None:
    assert transient(1, copies) >= 7.5 * transient(8, copies)
