"""From what the user said to a legal plan: flags, plugins, a plan file and ``auto`` joined into one.

Nothing here starts a process group: what is refused is refused before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paraflow.errors import PlanError
from paraflow.launch.environment import world_size
from paraflow.plan import Plan, merge_fields, read_fields
from paraflow.planner import Choice, Machine, choose
from paraflow.plugins.base import Plugin
from paraflow.plugins.registry import plugins_of
from paraflow.rules import Facts, check
from paraflow.scope_plans import fields_of

THE_SCOPES = "the model's scopes"


@dataclass(frozen=True)
class Request:
    """What a user asked for.

    Attributes:
        flags: The plan's fields that were said as arguments of the Trainer.
        plugins: Plugins that were given.
        plan: A plan, or the path of a YAML file with one.
        auto: ``"O1"`` or None.
        scopes: The plan's fields that the model's scopes ask for.
    """

    flags: Mapping[str, Any] = field(default_factory=dict)
    plugins: Sequence[Plugin] = ()
    plan: Plan | str | Path | None = None
    auto: str | None = None
    scopes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.auto not in (None, "O1"):
            raise PlanError(f"auto must be 'O1' or None, not {self.auto!r}.")
        self.fields()

    def chooses(self, name: str) -> bool:
        """Whether ``auto`` chooses a field, because it was left out."""
        return self.auto is not None and name not in self.fields()

    def fields(self) -> dict[str, Any]:
        """Returns the plan's fields that were said anywhere.

        Raises:
            PlanError: Two places contradict each other, or one is not of its kind.
        """
        said = self.sources()
        merged = _joined(said, self.scopes) if self.scopes else merge_fields(said)
        Plan.from_dict(merged)
        return merged

    def sources(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Returns where something was said, in words, and the plan's fields that were said there; but for the scopes.

        Raises:
            PlanError: A plan file cannot be read.
        """
        sources: list[tuple[str, Mapping[str, Any]]] = [("the Trainer's arguments", self.flags)]
        sources += [(f"the plugin {plugin.name!r}", plugin.fields) for plugin in self.plugins if _is_plugin(plugin)]
        if isinstance(self.plan, Plan):
            sources.append(("the plan", self.plan.changed()))
        elif self.plan is not None:
            sources.append((f"the plan {str(self.plan)!r}", read_fields(self.plan)))
        return sources

    def with_scopes(self, module: nn.Module, device: torch.device) -> Request:
        """Returns the request together with what a model's scopes ask for (`paraflow.scopes`).

        Raises:
            PlanError: The scopes cannot stand together or do not fit the world, or contradict what was said elsewhere.
        """
        said = replace(self, scopes={}).fields()
        joined = replace(self, scopes=fields_of(module, world_size(), said, device))
        joined.fields()
        return joined


@dataclass(frozen=True)
class Resolved:
    """A legal plan.

    Attributes:
        plan: The plan.
        plugins: What it is made of, in order.
        choices: What ``auto`` filled in.
    """

    plan: Plan
    plugins: list[Plugin]
    choices: list[Choice]


def _joined(sources: Sequence[tuple[str, Mapping[str, Any]]], scopes: Mapping[str, Any]) -> dict[str, Any]:
    """Joins what was said with what scopes say; options that both give one plugin may stand beside each other."""
    said = merge_fields(sources)
    options, extra = dict(said.get("options", {})), dict(scopes.get("options", {}))
    for plugin in [plugin for plugin in extra if plugin in options]:
        if all(extra[plugin].get(key, value) == value for key, value in options[plugin].items()):
            options[plugin] = {**options[plugin], **extra.pop(plugin)}
    merged = merge_fields([*sources, (THE_SCOPES, {**scopes, "options": extra})])
    together = {**merged.get("options", {}), **options}
    return {**merged, "options": together} if together else merged


def resolve(request: Request, device: torch.device, batch_size: int | None) -> Resolved:
    """Makes the plan of a run.

    Args:
        request: What was asked for.
        device: The device of this rank.
        batch_size: Samples of a step over all ranks; None where batches come ready-made.

    Raises:
        PlanError: The legality table refuses it; no process group has been started.
    """
    given = request.fields()
    choices = choose(machine(device), given) if request.auto else []
    filled = {**{choice.field: choice.value for choice in choices}, **given}
    if "dp" not in filled:
        without = Plan.from_dict({**filled, "dp": 1})
        filled["dp"] = max(1, world_size() // without.world_size)
    plan = Plan.from_dict(filled)
    chosen = {choice.field for choice in choices}
    plugins = plugins_of(_lenient(plan, chosen), request.plugins)
    check(facts(plan, plugins, device, batch_size), [rule for plugin in plugins for rule in plugin.rules])
    return Resolved(plan, plugins, choices)


def _lenient(plan: Plan, chosen: set[str]) -> Plan:
    """What ``auto`` chose is a wish, which an optimizer without that implementation need not grant."""
    if "optimizer_implementation" not in chosen or plan.optimizer_implementation == "default":
        return plan
    return plan.with_fields(options={**plan.options, "optimizer": {"required": False}})


def facts(plan: Plan, plugins: Sequence[Plugin], device: torch.device, batch_size: int | None) -> Facts:
    """Returns what the legality table looks at."""
    names = [plugin.name for plugin in plugins]
    return Facts(
        plan=plan,
        world_size=world_size(),
        device=device.type,
        bf16=device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False),
        batch_size=batch_size,
        provided=frozenset(name for plugin in plugins for name in (*plugin.provides, *plugin.fields)),
        runners=tuple(plugin.name for plugin in plugins if plugin.overrides("run_micro_batches")),
        repeated=tuple(sorted({name for name in names if names.count(name) > 1})),
        plugins=tuple(names),
    )


def machine(device: torch.device) -> Machine:
    """Returns what the planner is told of the devices."""
    return Machine(
        world_size=world_size(),
        device=device.type,
        bf16=device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False),
        fused_optimizers=device.type in ("cpu", "cuda"),
    )


def _is_plugin(plugin: object) -> bool:
    """What is no plugin is refused by name when the plan's plugins are put together."""
    return isinstance(plugin, Plugin)
