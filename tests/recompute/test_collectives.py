"""A recomputed block does not communicate again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.recompute.programs import talk


@pytest.mark.parametrize("kind", ["full", "selective", "offload"])
def test_collectives_are_not_called_again(ranks: Any, kind: str) -> None:
    for (plain, called), (again, called_again) in zip(ranks(2, talk, "keep"), ranks(2, talk, kind), strict=True):
        assert sum(called.values()) >= 2 * 9
        assert called_again == called
        assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
