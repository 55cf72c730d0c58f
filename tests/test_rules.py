from __future__ import annotations

from collections.abc import Callable

import pytest

from paraflow.errors import PlanError
from paraflow.plan import Plan
from paraflow.rules import RULES, Facts, Rule, check, violations

DP = frozenset({"dp"})
LEGAL = Facts(plan=Plan(dp=4, accumulate=2), world_size=4, batch_size=8, provided=DP)

# One run for each row of the table, which breaks that row alone, with what its refusal says: the reason, the remedy.
BROKEN: dict[str, tuple[Facts, str, str]] = {
    "strategy-missing": (
        Facts(plan=Plan(tp=2, cpu_offload="optimizer"), world_size=2, provided=DP),
        "['tp', 'cpu_offload']",
        "Trainer(plugins=[...])",
    ),
    "plugin-repeated": (
        Facts(plan=Plan(), repeated=("clipping",)),
        "('clipping',) were given more than once",
        "Keep one of each.",
    ),
    "one-runner": (
        Facts(plan=Plan(), runners=("pipeline", "mine")),
        "('pipeline', 'mine') each replace how a step's micro-batches are run",
        "Keep one of them.",
    ),
    "degrees-divide-world": (
        Facts(plan=Plan(fsdp=3), world_size=4, provided=frozenset({"fsdp"})),
        "takes 3 ranks, which does not divide the world of 4",
        "whose product divides 4, or start a multiple of 3 processes",
    ),
    "degrees-fill-world": (
        Facts(plan=Plan(dp=3, fsdp=2), world_size=4, provided=frozenset({"dp", "fsdp"})),
        "(dp=3, fsdp=2) is for 6 ranks, and the world has 4",
        "Write dp=2, or leave dp out, or start 6: paraflow launch -n 6 SCRIPT.",
    ),
    "batch-covers-ranks": (
        Facts(plan=Plan(dp=4), world_size=4, batch_size=3, provided=DP),
        "batch of 3 cannot be divided over 4 data ranks",
        "Write batch_size=4 or more, or start at most 3 processes",
    ),
    "batch-covers-micro-batches": (
        Facts(plan=Plan(dp=2, accumulate=3), world_size=2, batch_size=5, provided=DP),
        "batch of 5 on 2 data ranks has not enough samples for accumulate=3",
        "Write accumulate=2 or less",
    ),
    "bf16-on-device": (
        Facts(plan=Plan(precision="bf16"), device="cuda", bf16=False),
        "this cuda device does not compute in bf16",
        "Write precision='fp16'",
    ),
    "zero-without-fsdp": (
        Facts(plan=Plan(dp=4, zero=1), world_size=4, provided=DP),
        "zero=1 says what fsdp shards",
        "Write fsdp=4 too",
    ),
    "options-without-plugin": (
        Facts(plan=Plan(dp=4, options={"fsdp": {"reduce": "last"}}), world_size=4, provided=DP),
        "options for ['fsdp']",
        "leave the options out",
    ),
    "budget-without-choice": (
        Facts(plan=Plan(memory_budget="6GiB")),
        "memory_budget='6GiB' is what activations are to fit in",
        "Write activation_checkpointing='auto' too",
    ),
}


def test_every_row_has_a_case() -> None:
    assert list(BROKEN) == [rule.id for rule in RULES]


@pytest.mark.parametrize("rule", BROKEN)
def test_a_run_that_breaks_one_row_is_refused_by_it(rule: str) -> None:
    facts, reason, remedy = BROKEN[rule]
    assert [broken.id for broken in violations(facts)] == [rule]
    with pytest.raises(PlanError) as caught:
        check(facts)
    message = str(caught.value)
    assert caught.value.rule == rule
    assert message.startswith(f"[{rule}] ")
    assert message.index(reason) < message.index(remedy)


LEGAL_RUNS: dict[str, Facts] = {
    "one device": Facts(plan=Plan()),
    "replicas": LEGAL,
    "a batch that divides by nothing": Facts(plan=Plan(dp=3), world_size=3, batch_size=7, provided=DP),
    "ready-made batches": Facts(plan=Plan(dp=3, accumulate=5), world_size=3, batch_size=None, provided=DP),
    "one rank of what shards on more": Facts(plan=Plan(zero=1)),
    "options of what several ranks have": Facts(plan=Plan(options={"data_parallel": {}, "fsdp": {}})),
    "bf16 on a CPU": Facts(plan=Plan(precision="bf16")),
    "one runner": Facts(plan=Plan(pp=2), world_size=2, provided=frozenset({"pp"}), runners=("pipeline",)),
    "experts add no ranks": Facts(plan=Plan(dp=2, ep=2), world_size=2, provided=frozenset({"dp", "ep"})),
}


@pytest.mark.parametrize("facts", LEGAL_RUNS.values(), ids=LEGAL_RUNS.keys())
def test_legal_runs_pass(facts: Facts) -> None:
    assert violations(facts) == []
    check(facts)


def test_all_broken_rules_are_told_at_once() -> None:
    facts = Facts(plan=Plan(dp=3, precision="bf16"), world_size=4, bf16=False, batch_size=2, provided=DP)
    with pytest.raises(PlanError) as caught:
        check(facts)
    message = str(caught.value)
    assert caught.value.rule == "degrees-fill-world"
    assert [mark in message for mark in ("[degrees-fill-world]", "[batch-covers-ranks]", "[bf16-on-device]")] == [
        True
    ] * 3


def test_a_plugins_rules_are_asked_too() -> None:
    broken: Callable[[Facts], bool] = lambda f: f.plan.accumulate > 1  # noqa: E731
    rule = Rule("mine", broken, "It cannot do accumulate={f.plan.accumulate}.", "Write accumulate=1.")
    with pytest.raises(PlanError, match=r"^\[mine\] It cannot do accumulate=2\. Write accumulate=1\.$"):
        check(LEGAL, [rule])
    check(Facts(plan=Plan()), [rule])
