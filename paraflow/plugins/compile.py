"""torch.compile of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from paraflow.plan import Plan
from paraflow.plugins.base import Phase, Plugin

if TYPE_CHECKING:
    from paraflow.engine import Engine


class Compile(Plugin):
    """Compiles the model's forward in place: its parameters keep their names. The first step takes long.

    Args:
        **options: Arguments of torch.compile, such as ``mode`` or ``dynamic``.
    """

    name = "compile"
    phase = Phase.PREPARE

    def __init__(self, **options: Any) -> None:
        self._options = options

    @property
    def fields(self) -> Mapping[str, Any]:
        """That the model is compiled."""
        return {"compile": True}

    def transform(self, module: nn.Module, engine: Engine) -> nn.Module:
        """Compiles the user's module."""
        engine.module.compile(**self._options)
        return module

    def describe(self) -> str:
        """Returns one line for the printed plan."""
        options = ", ".join(f"{name}={value!r}" for name, value in self._options.items())
        return f"torch.compile({options}): the first step of each input shape compiles"


def from_plan(plan: Plan, options: Mapping[str, Any]) -> Compile | None:
    """Returns the plugin that a plan asks for, or None."""
    return Compile(**options) if plan.compile else None
