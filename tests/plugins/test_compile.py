"""torch.compile changes how fast a step is, and nothing else. Compiling takes long, so these are slow tests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.runs import assert_same, by_hand, by_trainer

pytestmark = pytest.mark.slow


def test_compiled_training_is_the_same() -> None:
    assert_same(by_trainer("classification", 20, 10, compile=True), by_hand("classification", 20, 10))


def test_compiled_training_is_the_same_on_two_ranks(ranks: Any) -> None:
    reference = by_hand("classification", 20, 10)
    for measured in ranks(2, by_trainer, "classification", 20, 10, compile=True, accumulate=2, timeout=170.0):
        assert_same(measured, reference)
