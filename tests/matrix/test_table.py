"""The compatibility table is complete, and the documentation has it as it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import paraflow as pf
from paraflow import plugins
from paraflow.compatibility import FEATURES, SITUATIONS, STRATEGIES, Entry, Situation, missing, page, pairs
from paraflow.compatibility.situations import LATER
from paraflow.plan import PLAN_FIELDS
from paraflow.plugins.registry import plugins_of
from paraflow.rules import RULES, Rule
from tests.matrix.models import CASES

PACKAGE = Path(pf.__file__ or "").parent
SOURCE = "".join(file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py"))
PLUGINS = [kind for kind in (getattr(plugins, name) for name in plugins.__all__) if hasattr(kind, "rules")]
ROWS: list[Rule] = [*RULES, *(rule for kind in PLUGINS for rule in kind.rules)]
ILLEGAL = [pair for pair in pairs() if not pair.verdict.legal]


def test_every_field_of_a_plan_is_in_the_table() -> None:
    assert {name for entry in (*STRATEGIES, *FEATURES) for name in entry.fields} == set(PLAN_FIELDS)


def test_every_plugin_is_in_the_table() -> None:
    theirs = {type(plugin) for pair in pairs() for plugin in pair.verdict.plugins}
    assert [kind for kind in PLUGINS if kind not in theirs] == [plugins.Plugin]


def test_every_rule_is_broken_somewhere() -> None:
    broken = {rule.id for pair in ILLEGAL for rule in pair.verdict.broken} | {s.rule for s in SITUATIONS} | {*LATER}
    assert broken == set(re.findall(r'(?:Rule\(\s*|Refusal\(|rule=)"([a-z0-9-]+)"', SOURCE))
    assert {rule.id for rule in ROWS} <= broken


def test_what_only_a_model_can_tell_is_raised() -> None:
    for rule, (_, reason, remedy) in LATER.items():
        assert f"[{rule}]" in SOURCE
        assert f'rule="{rule}"' in SOURCE
        assert (reason[-1], remedy[-1]) == (".", ".")


@pytest.mark.parametrize("entry", [*STRATEGIES, *FEATURES], ids=lambda entry: entry.name)
def test_what_one_writes_is_the_plan(entry: Entry) -> None:
    names = {kind.__name__: kind for kind in PLUGINS}
    asked: dict[str, Any] = eval(f"dict({entry.written})", dict(names))
    given = asked.pop("plugins", [])
    mine = plugins_of(pf.Plan.from_dict(asked), given)
    theirs = plugins_of(pf.Plan.from_dict(entry.fields))
    assert sorted(map(described, mine)) == sorted(map(described, theirs))


def described(plugin: plugins.Plugin) -> str:
    simple = (str, int, float, tuple, dict)
    plain = {name: value for name, value in vars(plugin).items() if isinstance(value, simple) and name != "rules"}
    return f"{type(plugin).__name__} {plain}"


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.rule)
def test_each_situation_breaks_its_rule(situation: Situation) -> None:
    assert situation.rule in [rule.id for rule in situation.verdict.broken]


def test_refusals_are_sentences_with_a_remedy() -> None:
    verdicts = [*(pair.verdict for pair in ILLEGAL), *(situation.verdict for situation in SITUATIONS)]
    for verdict in verdicts:
        for rule in verdict.broken:
            reason, remedy = rule.reason.format(f=verdict.facts), rule.remedy.format(f=verdict.facts)
            assert rule.explain(verdict.facts) == f"[{rule.id}] {reason} {remedy}"
            assert reason.endswith("."), reason
            assert remedy.endswith("."), remedy
            assert re.search(r"\b(Write|Leave|Choose|Keep|Start|Pass|Give|Use|Set|Open)\b", remedy), remedy


def test_ids_are_of_one_row_each() -> None:
    assert len({rule.id for rule in ROWS}) == len({id(rule) for rule in ROWS})


def test_every_kind_of_run_has_a_case() -> None:
    assert {feature.run for feature in FEATURES} == set(CASES)


def test_what_nobody_provides_is_told() -> None:
    text = page()
    assert all(entry.name in text for entry in missing())


def test_the_documentation_has_the_table() -> None:
    there = (PACKAGE.parent / "docs" / "compatibility.md").read_text(encoding="utf-8")
    assert there == page(), "write it anew: paraflow compatibility > docs/compatibility.md"
