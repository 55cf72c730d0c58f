"""Whether activations are recomputed or copied, in models so small that nothing would be by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from paraflow.planner.blocks import Profile
from paraflow.planner.recomputation import Costs, Cut, choose
from paraflow.recompute import calibration
from paraflow.recompute.offload import Waiting
from tests.matrix.models import Block


class Observed:
    """Counts what is done to spare memory, from `begin` on."""

    def __init__(self) -> None:
        self.copies = 0
        self.begin()

    def begin(self) -> None:
        """Begins to count."""
        self.copies, self._before = 0, Block.runs

    def seen(self) -> dict[str, int]:
        """How often blocks have run, and how many tensors that backward needs were copied to the host."""
        return {"blocks": Block.runs - self._before, "copies": self.copies}


@contextmanager
def observed() -> Iterator[Observed]:
    """Counts, and gives the choice of "auto" the smallest budget that it can meet, whatever the plan says."""
    seen, copy_of = Observed(), Waiting.copy_of

    def tightest(profile: Profile, budget: int, *, costs: Costs, **known: Any) -> Cut:
        seen.begin()  # what has run before was measured
        known["applying"] = 0  # the optimizer's peak is above that of such small activations
        free = replace(costs, bytes=0)  # a recomputation notes more bytes than a block of these models has
        return choose(profile, choose(profile, budget, costs=free, **known).smallest, costs=free, **known)

    def counted(self: Waiting, tensor: torch.Tensor) -> Any:
        seen.copies += 1
        return copy_of(self, tensor)

    with patch.object(Waiting, "copy_of", counted), patch.object(calibration, "choose", tightest):
        yield seen
