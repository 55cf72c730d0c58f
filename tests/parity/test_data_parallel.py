"""The same training under every plan: 1, 2, 3 ranks × 1, 2, 3 micro-batches against one big batch, written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parity.runs import assert_same, by_hand, by_trainer
from tests.parity.tasks import CASES

BATCH = 10
COUNTS = (23, 21)  # last batches of 3 and of 1: fewer than ranks × micro-batches


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_every_division_trains_alike(ranks: Any, name: str, world_size: int, accumulate: int) -> None:
    for count in COUNTS:
        reference = by_hand(name, count, BATCH)
        for measured in ranks(world_size, by_trainer, name, count, BATCH, accumulate=accumulate):
            assert_same(measured, reference)


@pytest.mark.parametrize("world_size", [1, 2])
def test_clipping_bounds_the_norm_of_the_whole_batch(ranks: Any, world_size: int) -> None:
    reference = by_hand("token sums", 23, BATCH, clip_norm=0.05)
    assert max(reference.norms) > 0.05
    for measured in ranks(world_size, by_trainer, "token sums", 23, BATCH, accumulate=2, clip_norm=0.05):
        assert_same(measured, reference)


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_optimizer_implementations_agree(implementation: str) -> None:
    measured = by_trainer("classification", 23, BATCH, optimizer_implementation=implementation)
    assert_same(measured, by_hand("classification", 23, BATCH))


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 3e-2), ("fp16", 5e-3)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_half_precision_stays_within_its_bound(ranks: Any, world_size: int, precision: str, bound: float) -> None:
    reference = by_hand("classification", 23, BATCH)
    for measured in ranks(world_size, by_trainer, "classification", 23, BATCH, accumulate=2, precision=precision):
        torch.testing.assert_close(measured.losses, reference.losses, rtol=bound, atol=bound)
        torch.testing.assert_close(measured.norms, reference.norms, rtol=bound * 5, atol=bound)
        for name, parameter in reference.parameters.items():
            torch.testing.assert_close(measured.parameters[name], parameter, rtol=bound, atol=bound * 2)


@pytest.mark.parametrize(("hook", "bound"), [("bf16", 2e-2), ("fp16", 2e-3)])
def test_half_communication_stays_within_its_bound(ranks: Any, hook: str, bound: float) -> None:
    reference = by_hand("classification", 23, BATCH)
    for measured in ranks(2, by_trainer, "classification", 23, BATCH, accumulate=2, comm_hook=hook):
        torch.testing.assert_close(measured.losses, reference.losses, rtol=bound, atol=bound)
        torch.testing.assert_close(measured.norms, reference.norms, rtol=bound, atol=bound)
        differs = any(not torch.equal(measured.parameters[n], p) for n, p in reference.parameters.items())
        assert differs, "the gradients were not rounded: the hook did not run"


def test_half_communication_on_one_rank_has_nothing_to_do() -> None:
    assert_same(by_trainer("classification", 23, BATCH, comm_hook="fp16"), by_hand("classification", 23, BATCH))


def test_automatic_plan_trains_alike(ranks: Any) -> None:
    reference = by_hand("classification", 23, BATCH)
    for measured in ranks(2, by_trainer, "classification", 23, BATCH, auto="O1"):
        assert_same(measured, reference)
