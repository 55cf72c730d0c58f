"""The table as a page of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from paraflow.compatibility.entries import Entry
from paraflow.compatibility.situations import LATER, SITUATIONS
from paraflow.compatibility.table import Pair, Verdict, columns, missing, pairs, rows
from paraflow.rules import Rule

_INTRODUCTION = """\
# What can be combined

Written by `paraflow compatibility` from the legality table that the Trainer asks before any process group starts; a
test holds this page to it. `make matrix` trains pairs that are marked ✓ on live ranks, and `make test-slow` the rest:
those with torch.compile, and of split layers and stages what other pairs nearly show. Loss, gradient norm, parameters,
metrics and checkpoint are those of one process: to 1e-5 in fp32, and with 16-bit numbers as near as their rounding
allows; with dropout they are those of one process that drops what the ranks have dropped. The models are tiny:
activations go to the host whatever their size, "recompute auto" gets the smallest budget that activations can meet,
fp16 begins with a scale that such a short run need not find first, and torch.compile goes through its backend for
debugging, which runs everywhere. Each pair that recomputes or copies activations is seen to do so.

✓ trains alike, – is the same field of a plan (one is written instead of the other), and a number is the refusal below.
"""


def page() -> str:
    """Returns docs/compatibility.md."""
    numbers = _numbers()
    layouts = [strategy for strategy in columns() if not strategy.fields or strategy.lays_out]
    others = [strategy for strategy in columns() if strategy not in layouts]
    divided = [layout for layout in layouts if layout.divides_layers]
    whole = [layout for layout in layouts if not layout.divides_layers]
    parts = [
        _INTRODUCTION,
        "## Whole layers on each rank\n",
        *_table(whole, numbers),
        "\n## Layers split over ranks, and stages\n",
        *_table(divided, numbers),
        *(["\n## What saves memory, on one device\n", *_table(others, numbers)] if others else []),
        "\n## What one writes\n",
        *_written(),
        "\n## What is refused\n",
        *_refusals(numbers),
        "\n## What the run refuses\n",
        "Rules that look at the world, the batch, the device, the plugins that were given, or details of one strategy; "
        "the last ones need the model and come when training begins.\n",
        *_situations(),
        *_not_there(),
    ]
    return "\n".join(parts) + "\n"


def _numbers() -> dict[tuple[str, ...], int]:
    """The refusals that occur in the table, each set of rules numbered."""
    found: dict[tuple[str, ...], int] = {}
    for pair in pairs():
        if not pair.verdict.legal:
            found.setdefault(_ids(pair.verdict), len(found) + 1)
    return found


def _ids(verdict: Verdict) -> tuple[str, ...]:
    return tuple(rule.id for rule in verdict.broken)


def _table(strategies: list[Entry], numbers: dict[tuple[str, ...], int]) -> Iterator[str]:
    yield _line(["", *(strategy.name for strategy in strategies)])
    yield _line(["---", *(":-:" for _ in strategies)])
    for feature in rows():
        yield _line([feature.name, *(_cell(Pair(strategy, feature), numbers) for strategy in strategies)])


def _cell(pair: Pair, numbers: dict[tuple[str, ...], int]) -> str:
    if pair.same:
        return "–"
    return "✓" if pair.verdict.legal else f"[{numbers[_ids(pair.verdict)]}](#what-is-refused)"


def _written() -> Iterator[str]:
    yield _line(["", "`Trainer(...)`"])
    yield _line(["---", "---"])
    for entry in dict.fromkeys((*columns(), *rows())):
        if entry.fields:
            yield _line([entry.name, f"`{entry.written}`"])


def _refusals(numbers: dict[tuple[str, ...], int]) -> Iterator[str]:
    if not numbers:
        yield "Nothing."
        return
    yield _line(["", "rule", "why", "what to write"])
    yield _line(["---:", "---", "---", "---"])
    examples = {_ids(pair.verdict): pair for pair in reversed(list(pairs())) if not pair.verdict.legal}
    for ids, number in numbers.items():
        verdict = examples[ids].verdict
        yield _line([str(number), *_explained(verdict.broken, verdict)])


def _situations() -> Iterator[str]:
    yield _line(["situation", "rule", "why", "what to write"])
    yield _line(["---", "---", "---", "---"])
    for situation in SITUATIONS:
        broken = [rule for rule in situation.verdict.broken if rule.id == situation.rule]
        yield _line([situation.name, *_explained(broken, situation.verdict)])
    for rule, (name, why, remedy) in LATER.items():
        yield _line([name, f"`{rule}`", why, remedy])


def _not_there() -> Iterator[str]:
    if missing():
        yield "\n## Not there yet\n"
        yield "; ".join(f"{entry.name} (`{entry.written}`)" for entry in missing()) + "."


def _explained(rules: Iterable[Rule], verdict: Verdict) -> list[str]:
    rules = list(rules)
    return [
        ", ".join(f"`{rule.id}`" for rule in rules),
        " ".join(rule.reason.format(f=verdict.facts) for rule in rules),
        " ".join(rule.remedy.format(f=verdict.facts) for rule in rules),
    ]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |".replace("|  |", "| |")
