"""The legality table: what cannot be combined, why, and what to write instead.

The trainer asks it before any process group starts, the planner before it proposes a plan, and the documentation
prints it. A rule is a row; a strategy brings its own rows with it (`paraflow.plugins.Plugin.rules`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from paraflow.errors import PlanError
from paraflow.plan import DEGREES, Plan

_ADDS_RANKS = (*DEGREES, "ep")
_OF_SEVERAL_RANKS = ("data_parallel", "fsdp", "pipeline", "split", "tensor_parallel")
_NEEDS_A_PLUGIN = (*_ADDS_RANKS, "activation_checkpointing", "cpu_offload", "apply_groups")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a run before it starts: all that a rule may look at.

    Attributes:
        plan: The plan that was asked for.
        world_size: The number of processes there are.
        device: The type of device: ``"cpu"``, ``"cuda"``, ``"mps"``.
        bf16: Whether the device computes in bf16 natively.
        batch_size: Samples of one optimizer step over all ranks; None where batches come ready-made.
        provided: The plan's fields that some plugin stands for.
        runners: The plugins that replace how micro-batches are run.
        repeated: The plugin names that were given twice.
        plugins: The names of the plugins, in order.
    """

    plan: Plan
    world_size: int = 1
    device: str = "cpu"
    bf16: bool = True
    batch_size: int | None = None
    provided: frozenset[str] = field(default_factory=frozenset)
    runners: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()

    @property
    def unprovided(self) -> list[str]:
        """The fields that ask for a strategy which no plugin provides."""
        return [name for name in self.plan.changed() if name in _NEEDS_A_PLUGIN and name not in self.provided]

    @property
    def idle_options(self) -> list[str]:
        """The plugins that the plan has options for and does not make; on one rank none is expected that adds ranks."""
        alone = _OF_SEVERAL_RANKS if self.world_size == 1 else ()
        return [name for name in self.plan.options if name not in (*self.plugins, *alone)]

    @property
    def model_ranks(self) -> int:
        """The ranks that one replica of the model takes."""
        return self.plan.world_size // self.plan.dp

    @property
    def fitting_dp(self) -> int:
        """The degree of data parallelism that would fill the world."""
        return max(1, self.world_size // self.model_ranks)

    @property
    def largest_accumulate(self) -> int:
        """The most micro-batches for which none is empty on any rank."""
        return max(1, (self.batch_size or 1) // self.plan.data_ranks)


@dataclass(frozen=True)
class Rule:
    """One row of the table.

    Attributes:
        id: A short name, stable over releases.
        broken: Whether the facts break the rule.
        reason: Why it is refused; a format string over ``f``, the facts.
        remedy: What to write instead; a format string over ``f``.
    """

    id: str
    broken: Callable[[Facts], bool]
    reason: str
    remedy: str

    def explain(self, facts: Facts) -> str:
        """Returns the refusal as one line: rule, reason, remedy."""
        return f"[{self.id}] {self.reason.format(f=facts)} {self.remedy.format(f=facts)}"


RULES: tuple[Rule, ...] = (
    Rule(
        "strategy-missing",
        lambda f: bool(f.unprovided),
        "The plan asks for {f.unprovided}, and no plugin that is installed or was given provides it.",
        "Leave it out, or pass a plugin that provides it: Trainer(plugins=[...]).",
    ),
    Rule(
        "plugin-repeated",
        lambda f: bool(f.repeated),
        "The plugins {f.repeated} were given more than once, and each describes one thing.",
        "Keep one of each.",
    ),
    Rule(
        "one-runner",
        lambda f: len(f.runners) > 1,
        "The plugins {f.runners} each replace how a step's micro-batches are run, and only one can.",
        "Keep one of them.",
    ),
    Rule(
        "degrees-divide-world",
        lambda f: f.world_size % f.model_ranks != 0,
        "One replica of the model takes {f.model_ranks} ranks, which does not divide the world of {f.world_size}.",
        "Choose degrees whose product divides {f.world_size}, or start a multiple of {f.model_ranks} processes.",
    ),
    Rule(
        "degrees-fill-world",
        lambda f: f.world_size % f.model_ranks == 0 and f.plan.world_size != f.world_size,
        "The plan ({f.plan}) is for {f.plan.world_size} ranks, and the world has {f.world_size}.",
        "Write dp={f.fitting_dp}, or leave dp out, or start {f.plan.world_size}: "
        "paraflow launch -n {f.plan.world_size} SCRIPT.",
    ),
    Rule(
        "batch-covers-ranks",
        lambda f: f.batch_size is not None and f.batch_size < f.plan.data_ranks,
        "A batch of {f.batch_size} cannot be divided over {f.plan.data_ranks} data ranks; batch_size counts the "
        "samples of one step over all ranks.",
        "Write batch_size={f.plan.data_ranks} or more, or start at most {f.batch_size} processes.",
    ),
    Rule(
        "batch-covers-micro-batches",
        lambda f: (
            f.batch_size is not None and f.plan.data_ranks <= f.batch_size < f.plan.data_ranks * f.plan.accumulate
        ),
        "A batch of {f.batch_size} on {f.plan.data_ranks} data ranks has not enough samples for "
        "accumulate={f.plan.accumulate} micro-batches on each.",
        "Write accumulate={f.largest_accumulate} or less, or a larger batch_size.",
    ),
    Rule(
        "bf16-on-device",
        lambda f: f.plan.precision == "bf16" and not f.bf16,
        "precision='bf16' was asked for, and this {f.device} device does not compute in bf16.",
        "Write precision='fp16' (with loss scaling, which Paraflow does) or 'fp32'.",
    ),
    Rule(
        "zero-without-fsdp",
        lambda f: f.plan.zero != 3 and f.plan.fsdp == 1 and f.world_size > 1,
        "zero={f.plan.zero} says what fsdp shards, and fsdp=1 shards nothing.",
        "Write fsdp={f.world_size} too, or leave zero out.",
    ),
    Rule(
        "options-without-plugin",
        lambda f: bool(f.idle_options),
        "The plan has options for {f.idle_options}, and no field of it asks for such a plugin.",
        "Write the field that does (fsdp=, accumulate=, precision= and so on), or leave the options out.",
    ),
    Rule(
        "budget-without-choice",
        lambda f: f.plan.memory_budget is not None and f.plan.activation_checkpointing is None,
        "memory_budget={f.plan.memory_budget!r} is what activations are to fit in, and none of them is given up.",
        "Write activation_checkpointing='auto' too, or leave memory_budget out.",
    ),
)
"""Every row that holds whatever the strategies; plugins add theirs."""


def violations(facts: Facts, extra: Iterable[Rule] = ()) -> list[Rule]:
    """Returns the rules that the facts break, in the table's order.

    Example:
        >>> [rule.id for rule in violations(Facts(plan=Plan(dp=3), world_size=4, provided=frozenset({"dp"})))]
        ['degrees-fill-world']
    """
    return [rule for rule in (*RULES, *extra) if rule.broken(facts)]


def check(facts: Facts, extra: Sequence[Rule] = ()) -> None:
    """Refuses what breaks a rule.

    Raises:
        PlanError: Some rule is broken; its message gives the rule, the reason and the remedy of each.
    """
    broken = violations(facts, extra)
    if broken:
        raise PlanError(" ".join(rule.explain(facts) for rule in broken), rule=broken[0].id)
