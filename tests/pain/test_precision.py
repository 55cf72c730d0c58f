"""Clipping sees gradients without the loss scale, and a step that is left out leaves everything as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paraflow as pf
from tests.callbacks.runs import linear, samples


def change(scale: float | None, accumulate: int) -> tuple[float, int]:
    """How far one clipped step of rate 0.1 moves the parameters, whose gradient is far above the bound of 0.25."""
    model = linear()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    x, y = samples(8)
    plugins = [] if scale is None else [pf.plugins.Precision("fp16", initial_scale=scale)]
    trainer = pf.Trainer(max_steps=1, clip_norm=0.25, accumulate=accumulate, progress=False, plugins=plugins)
    trainer.fit(model, (x, y + 9), batch_size=8)
    moved = [parameter - old for parameter, old in zip(model.parameters(), before, strict=True)]
    return float(torch.nn.utils.get_total_norm(moved)), trainer.step


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_clipped_step_is_as_long_as_the_bound_whatever_the_loss_scale(ranks: Any, accumulate: int) -> None:
    for scale in (None, 1.0, 2.0**10):
        for length, _ in ranks(2, change, scale, accumulate) + [change(scale, accumulate)]:
            assert length == pytest.approx(0.1 * 0.25, rel=1e-4)


def test_a_step_that_overflows_moves_nothing(ranks: Any) -> None:
    for length, steps in ranks(2, change, 2.0**127, 2) + [change(2.0**127, 2)]:
        assert (length, steps) == (0.0, 1)
