"""Under "auto" a run keeps to its budget, as torch's allocator counts, and what is advised where none fits does fit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paraflow as pf
from paraflow.mesh import Mesh
from paraflow.parts import local
from paraflow.plan import Plan
from paraflow.planner.blocks import BlockProfile, Operation, Profile
from paraflow.recompute.agreement import agreed
from tests.allocations import allocations

AUTO: dict[str, Any] = {"activation_checkpointing": "auto"}
WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))  # type: ignore[no-any-return]


class Net(pf.Model):
    def __init__(self, words: int = 40) -> None:
        super().__init__()
        self.words = nn.Embedding(words, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 10)
        self.configure(optimizer="adamw", lr=1e-3, loss="cross_entropy")

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.words(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(1))  # type: ignore[no-any-return]


class Peak(pf.Callback):
    """The peak of the second step: what is there before it, and each allocation and release in it."""

    def __init__(self, averages: Sequence[Any] = ()) -> None:
        self.bytes, self._averages = 0, averages

    def on_step_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        if trainer.step != 1:
            return
        engine = trainer.engine
        for parameter in engine.parameters:
            parameter.grad = None
        states = [value for state in engine.optimizer.state.values() for value in state.values()]
        averages = [tensor for held in self._averages for tensor in held._averages.tensors]
        tensors = [*engine.module.parameters(), *engine.module.buffers(), *states, *averages]
        self.bytes = sum(local(tensor).nbytes for tensor in tensors if torch.is_tensor(tensor))
        self._allocations = allocations()
        self._watched = self._allocations.__enter__()

    def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        if trainer.step == 2:
            self._allocations.__exit__(None, None, None)
            self.bytes += self._watched.peak


def fit(budget: int, callbacks: Sequence[pf.Callback] = (), batch: int = 16, words: int = 40, **plan: Any) -> None:
    torch.manual_seed(0)
    x, y = torch.randint(0, words, (2 * batch, 12)), torch.randint(0, 10, (2 * batch,))
    trainer = pf.Trainer(
        max_steps=2, seed=0, progress=False, device="cpu", callbacks=callbacks, memory_budget=budget, **AUTO, **plan
    )
    trainer.fit(Net(words), (x, y), batch_size=batch)


def refused(budget: int, callbacks: Sequence[pf.Callback] = (), **plan: Any) -> str:
    with pytest.raises(pf.PlanError) as raised:
        fit(budget, callbacks, **plan)
    return str(raised.value)


def smallest_budget(callbacks: Sequence[pf.Callback] = (), **plan: Any) -> int:
    found = re.search(r"memory_budget=(\d+)", refused(1000, callbacks, **plan))
    assert found is not None
    return int(found[1])


def budget_and_peak(ema: bool = False, **plan: Any) -> tuple[int, int]:
    """The smallest budget that can be met, by what a smaller one is told, and the peak of a run with it."""
    averages = [pf.callbacks.EMA(0.9)] if ema else []
    budget, peak = smallest_budget(averages, **plan), Peak(averages)
    fit(budget, [*averages, peak], **plan)
    return budget, peak.bytes


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"ema": True},
        {"optimizer_implementation": "foreach"},
        {"optimizer_implementation": "foreach", "apply_groups": 8},
        {"batch": 64, "accumulate": 2},
        {"words": 4000},
    ],
    ids=str,
)
def test_the_peak_of_a_run_is_its_budget(plan: dict[str, Any]) -> None:
    budget, peak = budget_and_peak(**plan)
    assert 0.85 * budget <= peak <= 1.05 * budget


def on_two_ranks() -> list[Any]:
    """Budgets and peaks of sharded runs; then what ranks agree on that measured different things."""
    several = {"fsdp": 2, "zero": 1, "accumulate": 2}
    peaks = [budget_and_peak(**several), budget_and_peak(fsdp=2, words=2000)]
    mesh = Mesh(Plan(dp=2), torch.device("cpu"))
    said: list[str] = []
    one = Operation("aten.tanh.default", 0, 1.0, 10 + mesh.rank)
    alike = Profile((BlockProfile("0", kept=10 + mesh.rank, operations=(one,)),), 1.0)
    apart = Profile((BlockProfile("0", kept=10 + mesh.rank, operations=(one,) * mesh.rank),), 1.0)
    return [peaks, agreed(mesh, alike, said.append), agreed(mesh, apart, said.append), said]


def test_the_peak_of_sharded_runs_is_their_budget_and_all_ranks_choose_from_the_same(ranks: Any) -> None:
    found = ranks(2, on_two_ranks)
    for budget, peak in found[0][0]:
        assert 0.85 * budget <= peak <= 1.05 * budget
    assert found[0][1:] == found[1][1:]
    _, alike, apart, said = found[0]
    assert alike.kept == apart.kept == 11
    assert alike.blocks[0].operations[0].bytes == apart.blocks[0].operations[0].bytes == 11
    assert ["rank 1, which keeps the most" in line for line in said] == [True]


def test_what_an_unmet_budget_is_told_to_write_meets_it() -> None:
    smallest = smallest_budget(batch=64)
    said = refused(int(0.8 * smallest), batch=64)
    accumulate = re.search(r"accumulate=(\d+)", said)
    assert accumulate is not None, said
    fit(int(0.8 * smallest), batch=64, accumulate=int(accumulate[1]))
    assert "accumulate=" not in refused(1000, batch=64)


def test_ranks_are_advised_where_the_models_state_is_what_is_too_much() -> None:
    said = refused(int(0.75 * smallest_budget(batch=4)), batch=4)
    assert "accumulate=" not in said
    assert re.search(r"fsdp=\d+ on \d+ ranks", said), said
    assert "fsdp=" not in refused(1000, batch=4)
