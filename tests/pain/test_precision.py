"""Clipping sees gradients without the loss scale, and a step that is left out leaves everything as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paraflow as pf
from paraflow.parts import whole
from tests.callbacks.runs import linear, samples


def change(scale: float | None, accumulate: int, **plan: Any) -> tuple[float, int]:
    """How far one clipped step of rate 0.1 moves the parameters, whose gradient is far above the bound of 0.25."""
    model = linear()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    x, y = samples(8)
    plugins = [] if scale is None else [pf.plugins.Precision("fp16", initial_scale=scale)]
    trainer = pf.Trainer(max_steps=1, clip_norm=0.25, accumulate=accumulate, progress=False, plugins=plugins, **plan)
    trainer.fit(model, (x, y + 9), batch_size=8)
    moved = [whole(parameter) - old for parameter, old in zip(model.parameters(), before, strict=True)]
    return float(torch.nn.utils.get_total_norm(moved)), trainer.step


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_clipped_step_is_as_long_as_the_bound_whatever_the_loss_scale(ranks: Any, accumulate: int) -> None:
    for scale in (None, 1.0, 2.0**10):
        for length, _ in ranks(2, change, scale, accumulate) + [change(scale, accumulate)]:
            assert length == pytest.approx(0.1 * 0.25, rel=1e-4)


def test_a_step_that_overflows_moves_nothing(ranks: Any) -> None:
    for length, steps in ranks(2, change, 2.0**127, 2) + [change(2.0**127, 2)]:
        assert (length, steps) == (0.0, 1)


ELSEWHERE: list[dict[str, Any]] = [
    {"fsdp": 2},
    {"dp": 2, "cpu_offload": "optimizer"},
    {"fsdp": 2, "cpu_offload": "optimizer"},
    {"cpu_offload": "params"},
]


@pytest.mark.parametrize("plan", ELSEWHERE, ids=str)
def test_the_scale_of_gradients_that_are_sharded_or_on_the_host(ranks: Any, plan: dict[str, Any]) -> None:
    """pytorch#111650, #82206, fairscale#421, #831: the scaler could not, or did not, look at gradients on the host."""
    for length, _ in ranks(2, change, 2.0**10, 2, **plan):
        assert length == pytest.approx(0.1 * 0.25, rel=1e-4)
    for length, steps in ranks(2, change, 2.0**127, 2, **plan):
        assert (length, steps) == (0.0, 1)


class OneIsLarge(pf.Model):
    """The last of four entries has a gradient that a scale of 2^10 takes out of range."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))
        self.configure(optimizer="sgd", lr=1.0)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.weight[:3].sum() + self.weight[3] * 2.0**120) * batch.mean()


def overflow_in_one_shard(plans: list[dict[str, Any]]) -> list[list[float]]:
    results = []
    for plan in plans:
        model = OneIsLarge()
        precision = pf.plugins.Precision("fp16", initial_scale=2.0**10)
        trainer = pf.Trainer(max_steps=1, progress=False, plugins=[precision], **plan)
        trainer.fit(model, torch.ones(4), batch_size=4)
        results.append(whole(model.weight).tolist())
    return results


def test_an_overflow_in_one_ranks_shard_drops_the_step_of_all(ranks: Any) -> None:
    """torchtitan#803: whether gradients are finite was decided by each rank for itself."""
    plans = [*ELSEWHERE[:3], {"fsdp": 2, "apply_groups": 2}, {"fsdp": 2, "zero": 1, "accumulate": 2}]
    assert ranks(2, overflow_in_one_shard, plans) == [[[0.0] * 4] * len(plans)] * 2
