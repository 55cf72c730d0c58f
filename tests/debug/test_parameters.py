"""Parameters that must be the same on several ranks, compared bit by bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import paraflow as pf
from paraflow.debug import require_equal
from paraflow.debug.parameters import fingerprint
from paraflow.engine import Engine
from tests.parity.tasks import CASES
from tests.plugins.toy_shard import ToyShard


def fitted(count: int = 20, **plan: Any) -> Engine:
    case = CASES["classification"]
    trainer = pf.Trainer(max_steps=2, progress=False, **plan)
    trainer.fit(case.model(), case.data(count), batch_size=10)
    return trainer.engine


def rank() -> int:
    return int(os.environ["RANK"])


def outcome(change: Callable[[Engine], None], ranks: tuple[int, ...] = (1,), **plan: Any) -> tuple[str, str]:
    """What is raised as the fit left the parameters, and after a change on some ranks."""
    engine = fitted(**plan)
    return _raised(engine), _changed(engine, change, ranks)


def _changed(engine: Engine, change: Callable[[Engine], None], ranks: tuple[int, ...]) -> str:
    if rank() in ranks:
        with torch.no_grad():
            change(engine)
    return _raised(engine)


def _raised(engine: Engine) -> str:
    try:
        require_equal(engine, 20)
    except pf.ParaflowError as error:
        return str(error)
    return "nothing"


def one_bit(engine: Engine) -> None:
    engine.parameters[2].view(torch.int32)[3, 5] ^= 1


def all_of_them(engine: Engine) -> None:
    for parameter in engine.parameters:
        parameter.add_(1)


def swap_two(engine: Engine) -> None:
    row = engine.parameters[0][0]
    row[[0, 1]] = row[[1, 0]].clone()


def learning_rate(engine: Engine) -> None:
    engine.optimizer.param_groups[0]["lr"] = 0.5


def step_count(engine: Engine) -> None:
    for state in engine.optimizer.state.values():
        state["step"] += 1


def frozen(engine: Engine) -> None:
    engine.parameters[1].requires_grad_(False).zero_()


def nothing(engine: Engine) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (one_bit, "1 of 6 differ: body.2.weight (rank 1 differs from rank 0). "),
        (swap_two, "1 of 6 differ: body.0.weight (rank 1 differs from rank 0). "),
        (learning_rate, "1 of 6 differ: the learning rate of parameter group 0 (rank 1 differs from rank 0). "),
        (step_count, "1 of 6 differ: the optimizer's count of steps (rank 1 differs from rank 0). "),
        (frozen, "1 of 6 differ: body.0.bias (rank 1 differs from rank 0). "),
    ],
)
def test_a_difference_is_named_on_both_ranks(ranks: Any, change: Any, told: str) -> None:
    results = ranks(2, outcome, change)
    assert results[0] == results[1]
    assert results[0][0] == "nothing"
    assert results[0][1].startswith(f"Step 20: ranks that must hold the same parameters do not. {told}")


def test_the_minority_is_named(ranks: Any) -> None:
    ((before, after),) = set(ranks(3, outcome, all_of_them, (0,)))
    assert before == "nothing"
    assert "4 of 6 differ: body.0.weight (rank 0 differs from ranks 1 and 2); body.0.bias (rank 0 differs" in after


class Deep(pf.Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6, bias=False) for _ in range(7))
        self.norm = torch.nn.BatchNorm1d(6, affine=False)
        self.configure(optimizer="sgd", lr=0.1, loss="cross_entropy")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        normal: torch.Tensor = self.norm(x)
        return normal


def deep() -> tuple[str, str, bool]:
    torch.manual_seed(0)
    trainer = pf.Trainer(max_steps=2, progress=False)
    model = Deep()
    trainer.fit(model, CASES["classification"].data(20), batch_size=10)
    assert model.norm.running_mean is not None
    others = trainer.mesh.all_gather(model.norm.running_mean)
    return _raised(trainer.engine), _changed(trainer.engine, all_of_them, (1,)), torch.equal(*others)


def test_many_are_counted_and_statistics_may_differ(ranks: Any) -> None:
    ((before, after, same_statistics),) = set(ranks(2, deep))
    assert before == "nothing"
    assert not same_statistics, "the test has nothing to show"
    assert "7 of 9 differ: layers.0.weight (" in after
    assert "layers.4.weight (rank 1 differs from rank 0); and 2 more. Something changed them" in after


def sharded(change: Callable[[Engine], None], changed: tuple[int, ...]) -> tuple[str, str]:
    return outcome(change, changed, plugins=[ToyShard(2)])


def both_kinds(change: Callable[[Engine], None], changed: tuple[int, ...]) -> tuple[str, str]:
    return outcome(change, changed, plugins=[ToyShard(2)], dp=2)


def first_shard(engine: Engine) -> None:
    engine.parameters[0][0] += 1


def test_parts_of_a_parameter_may_differ(ranks: Any) -> None:
    assert set(ranks(2, sharded, all_of_them, (1,))) == {("nothing", "nothing")}


def test_the_same_part_must_be_the_same(ranks: Any) -> None:
    ((before, after),) = set(ranks(4, both_kinds, first_shard, (3,)))
    assert before == "nothing"
    assert "1 of 6 differ: body.0.weight [fsdp=1] (rank 3 differs from rank 1). " in after


def test_one_process_has_nothing_to_compare() -> None:
    engine = fitted()
    require_equal(engine, 1)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex128]
)
def test_fingerprints_follow_the_bits(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randint(0, 2, (3, 700), generator=generator).to(dtype)
    other = tensor.clone()
    other[2, 3] = tensor[2, 3] == 0
    assert fingerprint(tensor) == fingerprint(tensor.clone())
    assert fingerprint(tensor) != fingerprint(other)
    assert fingerprint(tensor) == fingerprint(tensor.t().contiguous().t()), "the layout is no difference"
    assert fingerprint(tensor.new_zeros(())).shape == ()


def test_fingerprints_see_where_bits_are() -> None:
    long = torch.zeros(2**20 * 2 + 5)
    seen = set()
    for place in (0, 1, 2**20 - 1, 2**20, 2**21, 2**21 + 4):
        changed = long.clone()
        changed[place] = 1.0
        seen.add(int(fingerprint(changed)))
    assert len(seen | {int(fingerprint(long))}) == 7
    negative = torch.tensor([-0.0])
    assert fingerprint(negative) != fingerprint(torch.tensor([0.0]))
    second_differences = torch.tensor([1, 2, 3, 4]), torch.tensor([2, 0, 4, 4])  # equal sum and equal sum by position
    assert fingerprint(second_differences[0]) != fingerprint(second_differences[1])
