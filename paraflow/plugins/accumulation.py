"""Gradient accumulation: a rank runs its part of a batch in several micro-batches before the optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paraflow.plan import Plan
from paraflow.plugins.base import Phase, Plugin


class GradientAccumulation(Plugin):
    """Several micro-batches for one optimizer step: the memory of one, the gradient of all.

    It changes how a batch is divided, and nothing of what is computed: the engine runs whatever micro-batches it is
    given, and weights each loss by its items (`paraflow.loss`).

    Args:
        steps: Micro-batches a rank runs for one optimizer step.
    """

    name = "accumulation"
    phase = Phase.PREPARE

    def __init__(self, steps: int) -> None:
        self.steps = steps

    @property
    def fields(self) -> Mapping[str, Any]:
        """The number of micro-batches."""
        return {"accumulate": self.steps}

    def describe(self) -> str:
        """Returns one line for the printed plan."""
        return f"gradient accumulation: {self.steps} micro-batches a step on each rank"


def from_plan(plan: Plan, options: Mapping[str, Any]) -> GradientAccumulation | None:
    """Returns the plugin that a plan asks for, or None."""
    return GradientAccumulation(plan.accumulate, **options) if plan.accumulate > 1 else None
