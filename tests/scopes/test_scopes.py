"""Scopes mark modules where they are made; the marks go with them, and change nothing."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import paraflow as pf
from paraflow.scopes import scope_of, scopes_of_tensors
from tests.scopes.models import HeadBeside


def kinds(model: nn.Module) -> dict[str, str]:
    return {name: str(scope) for name, scope in scopes_of_tensors(model).items()}


def test_modules_are_marked_where_they_are_made() -> None:
    model = HeadBeside()
    assert {name.split(".")[0]: kind for name, kind in kinds(model).items()} == {"features": "replica", "head": "split"}
    assert scope_of(model) is None
    assert scope_of(model.features) is not None


def test_scopes_stand_around_functions_that_build_models() -> None:
    with pf.replica(), pf.pipeline():
        with pf.stage():
            first = nn.Linear(2, 2)
        with pf.stage():
            second = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        model = nn.Sequential(first, second, nn.Linear(2, 2))
    assert list(kinds(model).values()) == ["replica{pipeline{stage}}"] * 4 + ["replica{pipeline}"] * 2
    stages = {scope.inside("stage") for scope in scopes_of_tensors(model).values()}
    assert len(stages) == 3
    assert None in stages


def test_what_is_made_outside_and_registered_inside_is_inside() -> None:
    class Net(nn.Module):
        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            with pf.split():
                self.body = body
            self.rest = nn.Linear(2, 2)

    assert kinds(Net(nn.Sequential(nn.Linear(2, 2)))) == {"body.0.weight": "split", "body.0.bias": "split"}


def test_the_innermost_scope_counts_and_an_earlier_one_stays() -> None:
    with pf.replica():
        made = nn.Sequential(nn.Linear(2, 2, bias=False))
        with pf.split(2):
            inner = nn.Linear(2, 2, bias=False)
        block = nn.Sequential(made, inner)
    assert list(kinds(block).values()) == ["replica", "replica{split(2)}"]
    with pf.split():
        holder = nn.Sequential(block)
    assert list(kinds(holder).values()) == ["replica", "replica{split(2)}"]


def test_marks_survive_copies_and_deferred_init_and_add_no_state() -> None:
    with pf.deferred_init():
        deferred = HeadBeside(classes=1000)
    model = HeadBeside()
    assert list(model.state_dict()) == list(HeadBeside(scoped=False).state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), deferred):
        assert kinds(other) == kinds(model)
    clone = copy.deepcopy(model)
    assert scope_of(clone.head) is scope_of(model.head)


def test_nothing_is_marked_outside_of_scopes() -> None:
    with pf.replica():
        pass
    model = HeadBeside(scoped=False)
    assert not scopes_of_tensors(model)
    assert all("scope" not in key for module in model.modules() for key in vars(module))


Opening = Callable[[], Any]


@pytest.mark.parametrize(
    ("outer", "inner", "said"),
    [
        (pf.split, pf.split, "A split does not hold another"),
        (pf.replica, pf.replica, "A replica does not hold another"),
        (pf.pipeline, pf.pipeline, "A pipeline does not hold another"),
        (pf.split, pf.replica, "A replica is a whole model"),
        (pf.split, pf.pipeline, "A pipeline holds stages"),
        (pf.split, pf.stage, "A stage is a part of a pipeline"),
        (pf.replica, pf.stage, "A stage is a part of a pipeline"),
        (pf.pipeline, pf.split, "each layer belongs to a stage"),
        (pf.pipeline, pf.replica, "A replica is a whole model"),
        (pf.auto_parallel, pf.replica, "lays out all that is in it"),
        (pf.auto_parallel, pf.stage, "lays out all that is in it"),
        (pf.replica, pf.auto_parallel, "open it outermost"),
    ],
)
def test_what_cannot_be_nested_is_refused_with_the_reason(outer: Opening, inner: Opening, said: str) -> None:
    with pytest.raises(pf.PlanError, match=said), outer(), inner():
        pass
    with pf.replica(), pf.split():  # the stack is as it was
        pass


def test_a_pipeline_in_a_stage_and_a_stage_alone_are_refused() -> None:
    with pytest.raises(pf.PlanError, match="no stage or split is cut"), pf.pipeline(), pf.stage(), pf.pipeline():
        pass
    with pytest.raises(pf.PlanError, match=r"stage\(\) was opened outside of any scope"), pf.stage():
        pass


@pytest.mark.parametrize("n", [0, -1, 2.0, True, "2"])
def test_a_number_of_ranks_is_a_whole_number(n: Any) -> None:
    with pytest.raises(pf.PlanError, match="whole number"):
        pf.split(n)
    with pytest.raises(pf.PlanError, match="dim"):
        pf.split(dim=3)


def test_exceptions_and_threads_leave_the_stack_clean() -> None:
    with pytest.raises(ZeroDivisionError), pf.replica(), pf.split():
        raise ZeroDivisionError
    found: list[Any] = []

    def build() -> None:
        found.append(scopes_of_tensors(nn.Sequential(nn.Linear(2, 2))))
        with pf.split():
            found.append(kinds(nn.Sequential(nn.Linear(2, 2, bias=False))))

    with pf.replica():
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
        here = nn.Sequential(nn.Linear(2, 2, bias=False))
    assert found == [{}, {"0.weight": "split"}]
    assert kinds(here) == {"0.weight": "replica"}


def test_a_function_that_builds_is_decorated() -> None:
    @pf.split()
    def make() -> nn.Module:
        return nn.Linear(2, 2, bias=False)

    assert kinds(make()) == {"weight": "split"}
    assert scope_of(make()) is not scope_of(make())


def test_on_one_process_scopes_change_nothing() -> None:
    torch.manual_seed(0)
    data = (torch.randn(24, 6), torch.randint(0, 10, (24,)))
    trained = []
    for scoped in (True, False):
        torch.manual_seed(3)
        model = HeadBeside(scoped=scoped)
        history = pf.Trainer(max_epochs=2, progress=False).fit(model, data, batch_size=8)
        trained.append((history.history, model.state_dict()))
    (scoped, a), (plain, b) = trained
    assert scoped == plain
    assert all(torch.equal(a[name], b[name]) for name in b)
