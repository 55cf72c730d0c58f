from __future__ import annotations

import functools
import json
import math
import pickle
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from paraflow.errors import ModelError
from paraflow.optim import Schedule, build_schedule


def optimizer(lr: float = 2.0) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def rates(choice: Any, steps: int, **arguments: Any) -> list[float]:
    """The learning rate that each of `steps` optimizer steps uses, with a peak of 2."""
    owner = optimizer()
    scheduler = build_schedule(choice, owner, **arguments)
    used = []
    for _ in range(steps):
        used.append(owner.param_groups[0]["lr"])
        owner.step()
        scheduler.step()
    return used


@pytest.mark.parametrize(
    ("name", "middle", "end"),
    [("constant", 2.0, 2.0), ("linear", 1.0, 0.0), ("cosine", 1.0, 0.0), ("inverse_sqrt", 2 * math.sqrt(4 / 12), None)],
)
def test_rate_at_start_peak_middle_and_end(name: str, middle: float, end: float | None) -> None:
    used = rates(name, 26, total_steps=20, warmup=4)
    assert used[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert used[12] == pytest.approx(middle)
    assert used[20:] == pytest.approx([end if end is not None else 2 * math.sqrt(4 / step) for step in range(20, 26)])
    assert used[19] > 0


def test_cosine_is_a_cosine() -> None:
    expected = [1 + math.cos(math.pi * step / 20) for step in range(20)]
    assert rates("cosine", 20, total_steps=20) == pytest.approx(expected)


def test_one_cycle_is_torchs() -> None:
    owner = optimizer()
    theirs = OneCycleLR(owner, max_lr=2.0, total_steps=30, cycle_momentum=False)
    expected = []
    for _ in range(29):
        expected.append(owner.param_groups[0]["lr"])
        owner.step()
        theirs.step()
    expected += [owner.param_groups[0]["lr"]] * 4
    assert rates("one-cycle", 33, total_steps=30) == pytest.approx(expected)
    assert rates("one_cycle", 10, total_steps=30, warmup=6)[6] == pytest.approx(2.0)


def test_warmup_as_a_share_of_the_run() -> None:
    assert rates("linear", 9, total_steps=40, warmup=0.1) == rates("linear", 9, total_steps=40, warmup=4)


def test_warmup_longer_than_the_run() -> None:
    assert rates("cosine", 3, total_steps=2, warmup=9) == pytest.approx([0.2, 0.4, 0.6])


def test_no_schedule_and_warmup_alone() -> None:
    assert build_schedule(None, optimizer(), total_steps=None) is None
    assert build_schedule("constant", optimizer(), total_steps=5) is None
    assert rates(None, 4, total_steps=None, warmup=1) == [1.0, 2.0, 2.0, 2.0]


def test_state_is_json_and_a_longer_run_keeps_its_own_total() -> None:
    owner = optimizer()
    short = build_schedule("linear", owner, total_steps=10)
    for _ in range(5):
        owner.step()
        short.step()
    state = json.loads(json.dumps(short.state_dict()))
    again = optimizer()
    long = build_schedule("linear", again, total_steps=20)
    long.load_state_dict(state)
    again.step()
    long.step()
    assert again.param_groups[0]["lr"] == pytest.approx(2.0 * 14 / 20)
    assert short.state_dict()["last_epoch"] == 5


def test_schedule_can_be_pickled() -> None:
    factor = pickle.loads(pickle.dumps(Schedule("cosine", warmup=2, total=10).factor))
    assert factor(6) == pytest.approx(0.5)


def test_functions_and_ready_made_schedulers() -> None:
    owner = optimizer()
    made = build_schedule(functools.partial(StepLR, step_size=3), owner, total_steps=None)
    assert isinstance(made, StepLR)
    assert build_schedule(made, owner, total_steps=None) is made
    with pytest.raises(ModelError, match="StepLR that was given drives another optimizer"):
        build_schedule(made, optimizer(), total_steps=None)
    with pytest.raises(ModelError, match="returned a int"):
        build_schedule(lambda owner: 3, owner, total_steps=None)
    with pytest.raises(ModelError, match="on_validation_end"):
        build_schedule(ReduceLROnPlateau, owner, total_steps=None)


@pytest.mark.parametrize(
    ("choice", "arguments", "message"),
    [
        ("cosin", {"total_steps": 5}, 'No schedule is called "cosin". Did you mean "cosine"'),
        ("linear", {"total_steps": None}, "pass max_steps"),
        ("constant", {"total_steps": None, "warmup": 0.1}, "pass max_steps"),
        ("linear", {"total_steps": 5, "warmup": 1.5}, "float from 0 to below 1"),
        ("linear", {"total_steps": 5, "warmup": -1}, "float from 0 to below 1"),
    ],
)
def test_what_cannot_be_built_gets_a_sentence(choice: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_schedule(choice, optimizer(), **arguments)


def test_named_schedules_are_lambdas() -> None:
    assert isinstance(build_schedule("cosine", optimizer(), total_steps=5), LambdaLR)
