"""Which of torch's implementations of an optimizer runs: fused, for-each or one parameter after another."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from paraflow.errors import PlanError
from paraflow.plan import Plan
from paraflow.plugins.base import Phase, Plugin

if TYPE_CHECKING:
    from paraflow.engine import Engine

_FLAGS = {
    "fused": {"fused": True, "foreach": False},
    "foreach": {"fused": False, "foreach": True},
    "for-loop": {"fused": False, "foreach": False},
}


class OptimizerImplementation(Plugin):
    """Chooses the implementation of the optimizer; the mathematics is the same.

    An optimizer that has no such implementation keeps its own where `required` is False, as under ``auto``.

    Args:
        implementation: ``"fused"`` (one kernel over all parameters), ``"foreach"`` (one kernel per operation) or
            ``"for-loop"`` (least memory).
        required: Whether an optimizer without it is refused.
    """

    name = "optimizer"
    phase = Phase.OPTIMIZE

    def __init__(self, implementation: str = "fused", *, required: bool = True) -> None:
        if implementation not in _FLAGS:
            raise PlanError(
                f"The optimizer's implementation must be one of {', '.join(_FLAGS)}, not {implementation!r}."
            )
        self.implementation = implementation
        self._required = required

    @property
    def fields(self) -> Mapping[str, Any]:
        """The implementation."""
        return {"optimizer_implementation": self.implementation}

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, engine: Engine) -> torch.optim.Optimizer:
        """Sets the implementation in place, so that a scheduler that was made for the optimizer still holds it."""
        missing = unsupported(optimizer, self.implementation)
        if missing and self._required:
            raise PlanError(
                f"[optimizer-implementation] {type(optimizer).__name__} has no {missing} implementation. Leave "
                "optimizer_implementation out, or use adam, adamw, adagrad or sgd.",
                rule="optimizer-implementation",
            )
        if missing:
            return optimizer
        if self.implementation == "fused":
            _move_steps(optimizer)
        flags = {k: v for k, v in _FLAGS[self.implementation].items() if k in optimizer.defaults}
        optimizer.defaults.update(flags)
        for group in optimizer.param_groups:
            group.update(flags)
        return optimizer

    def describe(self) -> str:
        """Returns one line for the printed plan."""
        return f"the optimizer's {self.implementation} implementation"


def _move_steps(optimizer: torch.optim.Optimizer) -> None:
    """Fused kernels count steps in fp32 on the parameters' device; an optimizer may have counted elsewhere so far."""
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, torch.Tensor) and isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(parameter.device, torch.float32)


def unsupported(optimizer: torch.optim.Optimizer, implementation: str) -> str | None:
    """Returns the implementation's name if the optimizer's class does not have it, else None."""
    flag = "fused" if implementation == "fused" else "foreach"
    parameters = inspect.signature(type(optimizer).__init__).parameters
    return None if flag in parameters and flag in optimizer.defaults else implementation


def from_plan(plan: Plan, options: Mapping[str, Any]) -> OptimizerImplementation | None:
    """Returns the plugin that a plan asks for, or None."""
    if plan.optimizer_implementation == "default":
        return None
    return OptimizerImplementation(plan.optimizer_implementation, **options)
