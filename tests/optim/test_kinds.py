"""Which optimizers run torch's step as it is: told from the methods alone, whatever else was made or scheduled."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
from torch import nn

from paraflow.errors import CheckpointError, ModelError, PlanError
from paraflow.optim.kinds import is_elementwise, is_patched, torchs_kind
from paraflow.optim.rehearsal import steps_by_parameter
from paraflow.optim.stand_ins import follow
from paraflow.optim.state import load_optimizer_state, optimizer_state
from paraflow.optim.stepping import bare_step
from paraflow.optim.update import Update


def weight() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))]


class Named(torch.optim.AdamW):
    """Adds to torch's optimizer, and changes nothing of it."""

    def __init__(self, params: Any, label: str = "mine") -> None:
        super().__init__(params, lr=0.1)
        self.label = label

    def words(self) -> str:
        return self.label


class BoundsEach(torch.optim.SGD):
    """Bounds each gradient by its norm, before torch's step looks at it."""

    def _init_group(self, group: Any, *rest: Any) -> Any:
        for parameter in group["params"]:
            parameter.grad.mul_((0.05 / parameter.grad.norm()).clamp(max=1))
        return super()._init_group(group, *rest)


class Decorated(torch.optim.SGD):
    """A step that is decorated to look like torch's, and is not."""

    @functools.wraps(torch.optim.SGD.step)
    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["params"][0].grad.mul_(0.5)
        return torch.optim.SGD.step(self)


def test_torchs_step_is_known_whatever_else_was_made() -> None:
    for _ in range(2):  # torch wraps the step of a class when the first of it is made, and of those above it
        assert torchs_kind(Named(weight())) is torch.optim.AdamW
        assert is_elementwise(torch.optim.AdamW(weight()))
        torch.optim.Adam(weight())
    scheduled = Named(weight())
    torch.optim.lr_scheduler.ConstantLR(scheduled)
    assert is_elementwise(scheduled)


@pytest.mark.parametrize("kind", [BoundsEach, Decorated])
def test_what_was_overridden_is_no_step_of_torchs(kind: type[torch.optim.SGD]) -> None:
    for _ in range(2):
        optimizer = kind(weight(), lr=0.1)
        torch.optim.SGD(weight(), lr=0.1)
        torch.optim.lr_scheduler.ConstantLR(optimizer)
        assert torchs_kind(optimizer) is None
        assert not is_patched(optimizer)
        assert not is_elementwise(optimizer)
    first = optimizer.param_groups[0]["params"][0]
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.param_groups[0]["lr"] = 1.0
    bare_step(optimizer)()
    assert float(first[0, 0]) == pytest.approx(1 - (0.5 if kind is Decorated else 0.05 / 6**0.5))


@pytest.mark.parametrize("name", ["step", "_init_group"])
def test_a_method_that_was_replaced_on_the_optimizer_is_refused_in_groups(name: str) -> None:
    def mine(self: torch.optim.Optimizer, *arguments: Any) -> Any:
        return getattr(torch.optim.SGD, name)(self, *arguments)

    optimizer = torch.optim.SGD(weight(), lr=0.1)
    assert steps_by_parameter(optimizer)
    setattr(optimizer, name, types.MethodType(functools.wraps(getattr(torch.optim.SGD, name))(mine), optimizer))
    if name == "step":
        torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert is_patched(optimizer)
    assert not is_elementwise(optimizer)
    assert not steps_by_parameter(optimizer)
    with pytest.raises(PlanError, match="replaced after the run began"):
        bare_step(optimizer)


@pytest.mark.parametrize("when", ["pre", "post"])
def test_where_a_hook_looks_on_a_shard_is_not_enough(when: str) -> None:
    optimizer = torch.optim.SGD(weight(), lr=0.1)
    handle = getattr(optimizer, f"register_step_{when}_hook")(lambda *_: None)
    assert not is_elementwise(optimizer)
    assert steps_by_parameter(optimizer)
    handle.remove()
    assert is_elementwise(optimizer)


class Counts(torch.optim.SGD):
    """Counts its steps under a name of its own, and divides by the count where that is asked for."""

    def __init__(self, params: Any, divides: bool = True) -> None:
        super().__init__(params, lr=0.1)
        self.divides = divides

    def step(self, closure: Any = None) -> Any:
        self.state["count"] = (self.state["count"] or 0) + 1 if "count" in self.state else 1
        self.param_groups[0]["lr"] = 0.1 / self.state["count"] if self.divides else 0.1
        return super().step(closure)


def updated(values: list[nn.Parameter], steps: int, update: Update | None = None) -> Update:
    update = update or Update(Counts(values), {"a": values[0], "b": values[1]})
    for step in range(steps):
        for value in values:
            value.grad = torch.full_like(value, step + 1.0)
        update()
    return update


def test_what_an_optimizer_keeps_under_a_name_is_saved_and_taken_up() -> None:
    whole, values = weight(), weight()
    updated(whole, 2)
    saved = optimizer_state(updated(values, 2))
    assert saved["own"] == {"count": 2}
    again = Update(Counts(values), {"a": values[0], "b": values[1]})
    load_optimizer_state(again, saved)
    assert again.optimizer.state["count"] == 2
    reference, update = updated(whole, 2, updated(weight(), 0)), again
    updated(values, 1, update)
    assert update.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 3)
    assert "own" not in optimizer_state(Update(torch.optim.SGD(whole, lr=0.1), {"a": whole[0], "b": whole[1]}))
    reference.optimizer.state[3] = {}
    with pytest.raises(CheckpointError, match=r"keys that are neither parameters of the model nor names.* a int"):
        optimizer_state(reference)


def test_what_counts_its_calls_is_not_called_more_often() -> None:
    assert not steps_by_parameter(Counts(weight()))
    assert not steps_by_parameter(Counts(weight(), divides=False))


def test_state_of_parameters_without_memory_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    made = torch.optim.Adagrad(model.parameters())
    with pytest.raises(ModelError, match=r"Adagrad .* without memory.*optimizer=torch\.optim\.Adagrad"):
        follow(made, dict(model.named_parameters()), dict(model.named_parameters()))


def test_an_optimizer_of_another_model_or_run_gets_a_sentence() -> None:
    values = weight()
    optimizer = torch.optim.SGD(values, lr=0.1)
    with pytest.raises(ModelError, match="SGD holds 1 tensors that are no parameters of the model as it is now"):
        Update(optimizer, {"a": values[0]})
    update = Update(optimizer, {"a": values[0], "b": values[1]})
    Update(optimizer, {"a": values[0], "b": values[1]}).hold(lambda held: held.parameter.detach().clone())
    with pytest.raises(CheckpointError, match="used by a later Trainer"):
        optimizer_state(update)


class Called:
    """Is called in place of a method, and says that it wraps it."""

    def __init__(self, step: Any) -> None:
        functools.update_wrapper(self, step)
        self._step = step

    def __call__(self, closure: Any = None) -> Any:
        return self._step(closure)


def test_an_object_in_place_of_a_method_is_a_patch() -> None:
    optimizer = torch.optim.SGD(weight(), lr=0.1)
    optimizer.step = Called(optimizer.step)  # type: ignore[method-assign]
    assert is_patched(optimizer)
    assert not is_elementwise(optimizer)


def test_state_that_shares_memory_stays_shared_where_no_parameter_was_replaced() -> None:
    parameters = weight()
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
    parts = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        optimizer.state[parameter]["momentum_buffer"] = part.view_as(parameter)
    named = {str(place): parameter for place, parameter in enumerate(parameters)}
    follow(optimizer, named, named)
    flat += 1
    assert all(bool((optimizer.state[p]["momentum_buffer"] == 1).all()) for p in parameters)
