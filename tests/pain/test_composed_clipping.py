"""The gradient norm where parameters are split, staged, sharded, tied and whole side by side, and clipping by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import paraflow as pf
from tests.pain.composed import Steps, Task, assert_alike


class Pair(nn.Module):
    """A norm that every rank of a group has alike, two layers that are split, and a bias that is added once."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return result


class Mixed(pf.Model):
    """Parameters of each kind: of a layer that is split, of one that is not, of the root, used twice, frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Linear(5, 6)
        self.gain = nn.Parameter(torch.ones(6))  # used on all stages
        self.blocks = nn.ModuleList(Pair() for _ in range(4))
        self.head = nn.Linear(6, 3)
        self.blocks[1].norm.requires_grad_(False)
        trained = (p for p in self.parameters() if p.requires_grad)  # can be read once only
        self.configure(optimizer=torch.optim.SGD(trained, lr=1.0), loss="cross_entropy")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x) * self.gain
        for block in self.blocks:
            x = block(x) * self.gain
        return self.head(x)

    def mean_loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self(x), y)


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(19, 5, generator=generator), torch.randint(0, 3, (19,), generator=generator)


TASK = Task(Mixed, rows(), batch_size=8, epochs=2, clip=0.25)  # a last batch of three

Plans = list[dict[str, Any]]

ON_TWO: Plans = [
    {"tp": 2, "optimizer_implementation": "fused"},
    {"tp": 2, "scale": 2.0**8, "accumulate": 2},
    {"pp": 2, "optimizer_implementation": "foreach"},
    {"pp": 2, "scale": 2.0**8, "accumulate": 2},
]
ON_FOUR: Plans = [
    {"tp": 2, "fsdp": 2, "zero": 3},
    {"pp": 2, "fsdp": 2, "zero": 3, "accumulate": 2},
    {"tp": 2, "pp": 2, "accumulate": 2, "optimizer_implementation": "fused"},
]
MORE_ON_TWO: Plans = [
    {"tp": 2, "accumulate": 2, "optimizer_implementation": "foreach"},
    {"tp": 2, "apply_groups": 3},
    {"tp": 2, "cpu_offload": "optimizer", "optimizer_implementation": "fused"},
    {"pp": 2, "accumulate": 3, "optimizer_implementation": "fused"},
    {"pp": 2, "accumulate": 2, "optimizer_implementation": "foreach", "apply_groups": 2},
    {"pp": 2, "accumulate": 2, "options": {"pipeline": {"schedule": "zbv", "chunks": 2}}},
    {"pp": 2, "cpu_offload": "optimizer", "accumulate": 2},
]
MORE_ON_FOUR: Plans = [
    {"tp": 2, "fsdp": 2, "zero": 1, "accumulate": 2, "optimizer_implementation": "fused"},
    {"tp": 2, "dp": 2, "optimizer_implementation": "foreach"},
    {"pp": 2, "dp": 2, "accumulate": 3, "scale": 2.0**8},
    {"tp": 2, "pp": 2, "accumulate": 2, "optimizer_implementation": "foreach", "apply_groups": 2},
    {"tp": 2, "pp": 2, "accumulate": 2, "cpu_offload": "optimizer", "scale": 2.0**8},
    {"pp": 4, "accumulate": 4},
]


def steps_under(plans: Plans) -> list[Steps]:
    return [TASK.under(**plan) for plan in plans]


@pytest.mark.parametrize(
    ("pairs", "fours"),
    [(ON_TWO, ON_FOUR), pytest.param(MORE_ON_TWO, MORE_ON_FOUR, marks=pytest.mark.slow)],
    ids=["some", "more"],
)
def test_the_norm_is_that_of_the_whole_gradient_however_it_lies(ranks: Any, pairs: Plans, fours: Plans) -> None:
    """pytorch#170862, LoongForge#152: the norm of a rank's parts was logged and clipped by.

    pytorch PR#88955: what ranks have alike (norms, biases behind split layers, what several stages use) counts once.
    torchtitan#596, #649, pytorch#139467, #162638: under stages the norm was that of one stage. torchtitan#4312: it
    may differ from one process in the last bits, and not from rank to rank. Megatron-LM#6489, pytorch#153268, #157682:
    fused and foreach optimizers with parameters on several meshes. AReaL#335: parameters from a generator.
    Megatron-LM#443, #1446: with rate 1 each parameter moves by its gradient, those of norms between split layers too.
    """
    expected = TASK.by_hand()
    assert max(expected.norms) > 2 * TASK.clip
    assert_alike(ranks(2, steps_under, pairs), pairs, expected)
    assert_alike(ranks(4, steps_under, fours), fours, expected)
