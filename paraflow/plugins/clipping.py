"""Clipping by the global gradient norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from paraflow.plan import Plan
from paraflow.plugins.base import Phase, Plugin

if TYPE_CHECKING:
    from paraflow.engine import Engine


class Clipping(Plugin):
    """Scales the gradients down where their norm, over all parameters and ranks, exceeds a bound.

    The norm is that of the whole batch's gradient: after reduction, after the loss scale is taken out.

    Args:
        max_norm: The bound; ``inf`` measures the norm, and logs it as ``grad_norm``, without clipping.
    """

    name = "clipping"
    phase = Phase.OPTIMIZE

    def __init__(self, max_norm: float) -> None:
        self.max_norm = max_norm

    @property
    def fields(self) -> Mapping[str, Any]:
        """The bound."""
        return {"clip_norm": self.max_norm}

    def step(self, engine: Engine, proceed: Callable[[], bool]) -> bool:
        """Measures the norm, and scales the gradients if there is a bound."""
        norm = engine.gradient_norm()
        engine.last_norm = norm
        if not math.isinf(self.max_norm):
            # As torch.nn.utils.clip_grad_norm_ does: no branch on the value, so no wait for the device.
            factor = torch.clamp(self.max_norm / (norm + 1e-6), max=1.0)
            engine.scale_gradients(factor)
        return proceed()

    def describe(self) -> str:
        """Returns one line for the printed plan."""
        if math.isinf(self.max_norm):
            return "the global gradient norm is measured and not clipped"
        return f"gradients clipped to a global norm of {self.max_norm:g}"


def from_plan(plan: Plan, options: Mapping[str, Any]) -> Clipping | None:
    """Returns the plugin that a plan asks for, or None."""
    return Clipping(plan.clip_norm, **options) if plan.clip_norm is not None else None
