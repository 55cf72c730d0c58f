"""The table: each pair of strategy and feature, and what the legality table says of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch

from paraflow.compatibility.entries import FEATURES, STRATEGIES, Entry
from paraflow.plan import Plan
from paraflow.plugins.base import Plugin
from paraflow.plugins.registry import plugins_of
from paraflow.resolve import facts
from paraflow.rules import Facts, Rule, violations


@dataclass(frozen=True)
class Verdict:
    """What the legality table says of a plan.

    Attributes:
        facts: What it was asked about.
        broken: The rules that refuse it, in the table's order; empty where it is legal.
        plugins: What the plan is made of.
    """

    facts: Facts
    broken: tuple[Rule, ...]
    plugins: tuple[Plugin, ...]

    @property
    def legal(self) -> bool:
        """Whether no rule refuses it."""
        return not self.broken


def judge(fields: Mapping[str, Any], given: Sequence[Plugin] = (), **known: Any) -> Verdict:
    """Asks the legality table about a plan, without starting anything.

    Args:
        fields: The plan's fields.
        given: Plugins that are brought along.
        known: What else is known of the run: `Facts` has the names. The world is as large as the plan, the device a
            CPU, and batches come ready-made where nothing is said.

    Example:
        >>> judge({"dp": 4, "accumulate": 2}).legal
        True
        >>> [rule.id for rule in judge({"dp": 4}, world_size=6).broken]
        ['degrees-fill-world']
    """
    plan = Plan.from_dict(fields)
    plugins = plugins_of(plan, given)
    asked = facts(plan, plugins, torch.device("cpu"), None)
    asked = replace(asked, **{"world_size": plan.world_size, **known})
    broken = violations(asked, [rule for plugin in plugins for rule in plugin.rules])
    return Verdict(asked, tuple(broken), tuple(plugins))


@dataclass(frozen=True)
class Pair:
    """A strategy with a feature.

    Attributes:
        strategy: The strategy.
        feature: The feature, which may be another strategy.
    """

    strategy: Entry
    feature: Entry

    @property
    def name(self) -> str:
        """Both names."""
        return f"{self.strategy.name} + {self.feature.name}"

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a plan that asks for both."""
        fields = {**self.strategy.fields, **self.feature.fields}
        options = {**self.strategy.options, **self.feature.options}
        return {**fields, "options": options} if options else fields

    @property
    def run(self) -> str:
        """What kind of model or run it is about."""
        return self.feature.run

    @property
    def same(self) -> bool:
        """Whether both are said by one field of a plan, so that one is said instead of the other."""
        return not self.strategy.said.isdisjoint(self.feature.said)

    @cached_property
    def ranks(self) -> int:
        """The ranks it takes."""
        return Plan.from_dict(self.fields).world_size

    @cached_property
    def verdict(self) -> Verdict:
        """What the legality table says of it."""
        return judge(self.fields)

    @property
    def key(self) -> tuple[str, str]:
        """What is the same for two pairs that are one training."""
        return repr(sorted(self.fields.items())), self.run


@cache
def columns() -> tuple[Entry, ...]:
    """Returns the strategies that some plugin provides."""
    return tuple(strategy for strategy in STRATEGIES if not _missing(strategy))


@cache
def missing() -> tuple[Entry, ...]:
    """Returns the strategies that a plan has a field for, and no plugin provides."""
    return tuple(strategy for strategy in STRATEGIES if _missing(strategy))


def _missing(strategy: Entry) -> bool:
    return "strategy-missing" in [rule.id for rule in judge(strategy.fields).broken]


@cache
def rows() -> tuple[Entry, ...]:
    """Returns what each strategy is combined with: the features, and the strategies that are no layout."""
    return (*FEATURES, *(strategy for strategy in columns() if strategy.fields and not strategy.lays_out))


def pairs() -> Iterator[Pair]:
    """Yields every pair once: two strategies in one order only, and none whose two are one field of a plan."""
    seen = set()
    for strategy in columns():
        for feature in rows():
            found = Pair(strategy, feature)
            if not found.same and found.key not in seen:
                seen.add(found.key)
                yield found
