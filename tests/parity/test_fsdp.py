"""The same training when parameters, gradients and optimizer state are shared out over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paraflow as pf
from tests.parity.runs import Measured, assert_same, by_hand, by_trainer

BATCH = 12  # three micro-batches on each of four ranks
COUNT = 23  # and a last batch of 11


def sharded(name: str, degree: int, arguments: dict[str, Any], **plan: Any) -> Measured:
    return by_trainer(name, COUNT, BATCH, plugins=[pf.plugins.FSDP(degree, **arguments)], **plan)


@pytest.mark.parametrize(
    ("dp", "fsdp", "zero", "accumulate"),
    [(1, 2, 1, 3), (1, 2, 2, 3), (1, 2, 3, 1), (2, 2, 1, 1), (2, 2, 3, 3), (1, 4, 2, 1)],
)
def test_every_level_trains_alike(ranks: Any, dp: int, fsdp: int, zero: int, accumulate: int) -> None:
    reference = by_hand("classification", COUNT, BATCH, clip_norm=0.2)
    plan = {"dp": dp, "fsdp": fsdp, "zero": zero, "accumulate": accumulate, "clip_norm": 0.2}
    for measured in ranks(dp * fsdp, by_trainer, "classification", COUNT, BATCH, **plan):
        assert_same(measured, reference)
        assert all(type(norm) is float for norm in measured.norms)


@pytest.mark.parametrize(
    ("name", "zero", "reduce"),
    [("token sums", 3, "last"), ("token means", 2, "each"), ("own loss", 3, "each"), ("token means", 1, "each")],
)
def test_both_ways_of_reducing_train_alike(ranks: Any, name: str, zero: int, reduce: str) -> None:
    reference = by_hand(name, COUNT, BATCH)
    for measured in ranks(2, sharded, name, 2, {"zero": zero, "reduce": reduce}, accumulate=3):
        assert_same(measured, reference)


@pytest.mark.parametrize(
    ("arguments", "plan", "bound"),
    [
        ({}, {"precision": "bf16"}, 3e-2),
        ({"gather_dtype": "bf16", "reduce": "last"}, {"precision": "bf16", "accumulate": 3}, 3e-2),
        ({}, {"precision": "fp16", "accumulate": 2}, 5e-3),
        ({"zero": 1}, {"comm_hook": "bf16", "accumulate": 2}, 2e-2),
    ],
)
def test_half_precision_stays_within_its_bound(
    ranks: Any, arguments: dict[str, Any], plan: dict[str, Any], bound: float
) -> None:
    reference = by_hand("classification", COUNT, BATCH)
    for measured in ranks(2, sharded, "classification", 2, arguments, **plan):
        torch.testing.assert_close(measured.losses, reference.losses, rtol=bound, atol=bound)
        torch.testing.assert_close(measured.norms, reference.norms, rtol=bound * 5, atol=bound)
        for name, parameter in reference.parameters.items():
            torch.testing.assert_close(measured.parameters[name], parameter, rtol=bound, atol=bound * 2)
        assert any(not torch.equal(measured.parameters[n], p) for n, p in reference.parameters.items())


@pytest.mark.parametrize("offload", ["params", 0.5])
def test_parameters_on_the_host_train_alike(ranks: Any, offload: Any) -> None:
    reference = by_hand("classification", COUNT, BATCH)
    assert_same(ranks(1, by_trainer, "classification", COUNT, BATCH, cpu_offload=offload)[0], reference)
    for measured in ranks(2, by_trainer, "classification", COUNT, BATCH, cpu_offload=offload, dp=2, accumulate=2):
        assert_same(measured, reference)
