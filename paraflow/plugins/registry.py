"""From a plan to its plugins: the package's own, and those the user brings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paraflow.errors import PlanError
from paraflow.plan import Plan
from paraflow.plugins import (
    accumulation,
    activation_checkpointing,
    apply_groups,
    clipping,
    communication,
    compile,
    cpu_offload,
    data_parallel,
    fsdp,
    optimizer,
    pipeline,
    precision,
    split,
    tensor_parallel,
)
from paraflow.plugins.base import Plugin, in_order

_FROM_PLAN: dict[str, Callable[[Plan, Mapping[str, Any]], Plugin | None]] = {
    "accumulation": accumulation.from_plan,
    "activation_checkpointing": activation_checkpointing.from_plan,
    "apply_groups": apply_groups.from_plan,
    "clipping": clipping.from_plan,
    "communication": communication.from_plan,
    "compile": compile.from_plan,
    "cpu_offload": cpu_offload.from_plan,
    "data_parallel": data_parallel.from_plan,
    "fsdp": fsdp.from_plan,
    "optimizer": optimizer.from_plan,
    "pipeline": pipeline.from_plan,
    "precision": precision.from_plan,
    "split": split.from_plan,
    "tensor_parallel": tensor_parallel.from_plan,
}
"""Each of the package's plugins, by name; a new strategy adds its line."""


def plugins_of(plan: Plan, given: Sequence[Plugin] = ()) -> list[Plugin]:
    """Returns the plugins that a plan asks for, in order.

    Args:
        plan: The plan.
        given: Plugins the user brings; one of these replaces the package's own of that name, and one that stands for a
            field of the plan replaces whatever else would provide it.

    Raises:
        PlanError: The plan has options for a plugin that does not exist, or that one does not take.
    """
    for plugin in given:
        _require_plugin(plugin)
    taken_names = {plugin.name for plugin in given}
    taken_fields = {name for plugin in given for name in plugin.fields}
    own: list[Plugin] = []
    for name, options in plan.options.items():
        if name not in _FROM_PLAN and name not in taken_names:
            raise PlanError(f"The plan has options for a plugin {name!r}; the plugins are {', '.join(_FROM_PLAN)}.")
        if name in taken_names:
            raise PlanError(f"The plugin {name!r} was given, and the plan has options for it: {dict(options)}.")
    for name, from_plan in _FROM_PLAN.items():
        made = _make(name, from_plan, plan)
        if made is not None and name not in taken_names and taken_fields.isdisjoint(made.fields):
            own.append(made)
    replaced = {name for plugin in (*own, *given) for name in plugin.replaces}
    return in_order([*(plugin for plugin in own if plugin.name not in replaced), *given])


def _make(name: str, from_plan: Callable[[Plan, Mapping[str, Any]], Plugin | None], plan: Plan) -> Plugin | None:
    options = plan.options.get(name, {})
    try:
        return from_plan(plan, options)
    except TypeError as error:
        raise PlanError(f"The plugin {name!r} does not take the options {dict(options)}: {error}.") from error


def _require_plugin(plugin: object) -> None:
    if isinstance(plugin, type) and issubclass(plugin, Plugin):
        raise PlanError(f"plugins holds the class {plugin.__name__}; give an instance: {plugin.__name__}(...).")
    if not isinstance(plugin, Plugin):
        raise PlanError(f"plugins must hold paraflow.plugins.Plugin objects, not {plugin!r}.")
    if not isinstance(getattr(plugin, "name", None), str):
        raise PlanError(f'The plugin {type(plugin).__name__} has no name; write `name = "..."` in its class.')
