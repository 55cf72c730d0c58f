"""What is refused for the world, the batch, the device or the plugins that it meets, and not for a pair of features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from paraflow.compatibility.table import Verdict, judge
from paraflow.plugins import FSDP, Clipping, DataParallel, Plugin, TensorParallel

if TYPE_CHECKING:
    from paraflow.data.batch import Batch
    from paraflow.engine import Engine
    from paraflow.loss import StepOutput


@dataclass(frozen=True)
class Situation:
    """A plan that is refused where it is asked for, and would be legal elsewhere.

    Attributes:
        rule: The rule that refuses it.
        name: The situation in words.
        fields: The plan's fields.
        known: What is known of the run (`paraflow.rules.Facts`).
        given: Plugins that were brought along.
    """

    rule: str
    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    known: Mapping[str, Any] = field(default_factory=dict)
    given: Sequence[Plugin] = ()

    @cached_property
    def verdict(self) -> Verdict:
        """What the legality table says of it."""
        return judge(self.fields, self.given, **self.known)


class _Runner(Plugin):
    """Stands for a plugin that runs micro-batches in an order of its own."""

    def run_micro_batches(self, engine: Engine, batch: Batch) -> list[StepOutput]:
        return engine.run_in_turn(batch)


class _MyPipeline(_Runner):
    name: ClassVar[str] = "my_pipeline"


class _YourPipeline(_Runner):
    name: ClassVar[str] = "your_pipeline"


_SPLIT = {"split": {"modules": ("head",)}}

SITUATIONS: tuple[Situation, ...] = (
    Situation("strategy-missing", "a strategy that nobody provides", {"cp": 4}),
    Situation("plugin-repeated", "one plugin given twice", given=(Clipping(1.0), Clipping(1.0))),
    Situation("one-runner", "two plugins that both run micro-batches", given=(_MyPipeline(), _YourPipeline())),
    Situation("degrees-divide-world", "2 ranks a replica in a world of 5", {"fsdp": 2}, {"world_size": 5}),
    Situation("degrees-fill-world", "a plan for 2 ranks in a world of 4", {"dp": 2}, {"world_size": 4}),
    Situation("batch-covers-ranks", "a batch of 3 on 4 data ranks", {"dp": 4}, {"batch_size": 3}),
    Situation(
        "batch-covers-micro-batches", "a batch of 5 in 2 × 3 parts", {"dp": 2, "accumulate": 3}, {"batch_size": 5}
    ),
    Situation(
        "bf16-on-device", "bf16 on a device without it", {"precision": "bf16"}, {"device": "cuda", "bf16": False}
    ),
    Situation("zero-without-fsdp", "a zero level and nothing sharded", {"dp": 4, "zero": 1}),
    Situation("options-without-plugin", "options for a plugin that is not made", {"options": {"clipping": {}}}),
    Situation("budget-without-choice", "a budget and nothing that keeps to it", {"memory_budget": "6GiB"}),
    Situation(
        "budget-needs-auto",
        "a budget, and the activations chosen already",
        {"memory_budget": "6GiB", "activation_checkpointing": "full"},
    ),
    Situation(
        "fsdp-unused-in-turn",
        "ranks that use other parameters, and a plugin that runs micro-batches",
        {"fsdp": 4},
        given=(FSDP(4, find_unused_parameters=True), _MyPipeline()),
    ),
    Situation(
        "auto-recompute-runner",
        "measured recomputation, and a plugin that runs micro-batches",
        {"activation_checkpointing": "auto"},
        given=(_MyPipeline(),),
    ),
    Situation(
        "backward-apply-runner",
        "apply in backward, and a plugin that runs micro-batches",
        {"apply_groups": "backward"},
        given=(_MyPipeline(),),
    ),
    Situation("fsdp-without-degree", "the plugin FSDP without a degree", {"dp": 4}, given=(FSDP(),)),
    Situation(
        "fsdp-is-data-parallel",
        "the plugin DataParallel beside sharding",
        {"dp": 2, "fsdp": 2},
        given=(DataParallel(),),
    ),
    Situation(
        "data-parallel-static-graph",
        "the same graph in every step, and a plugin that runs micro-batches",
        {"dp": 4},
        given=(DataParallel(4, static_graph=True), _MyPipeline()),
    ),
    Situation(
        "fsdp-gather-dtype",
        "weights gathered in bf16 for products in fp32",
        {"fsdp": 4, "options": {"fsdp": {"gather_dtype": "bf16"}}},
    ),
    Situation(
        "fsdp-reshard-divides",
        "weights kept by 3 of 4 ranks",
        {"fsdp": 4, "options": {"fsdp": {"reshard_after_forward": 3}}},
    ),
    Situation(
        "fsdp-comm-hook",
        "micro-batches added up in 16 bits",
        {"fsdp": 4, "accumulate": 2, "comm_hook": "bf16", "options": {"fsdp": {"reduce": "last"}}},
    ),
    Situation(
        "tensor-parallel-without-degree",
        "the plugin TensorParallel without a degree",
        {"dp": 4},
        given=(TensorParallel(),),
    ),
    Situation(
        "sequence-parallel-pipeline",
        "shares of the sequence, and stages",
        {"pp": 2, "tp": 2, "options": {"tensor_parallel": {"sequence_parallel": True}}},
    ),
    Situation(
        "pipeline-schedule-unknown",
        "a schedule that there is not",
        {"pp": 2, "options": {"pipeline": {"schedule": "looped"}}},
    ),
    Situation(
        "pipeline-chunks",
        "a schedule for several stages on each rank, and one of them",
        {"pp": 2, "options": {"pipeline": {"schedule": "interleaved"}}},
    ),
    Situation(
        "pipeline-reshard-halves",
        "parameters gathered anew, and backward in halves",
        {"fsdp": 2, "pp": 2, "options": {"pipeline": {"schedule": "zbv", "chunks": 2, "reshard": True}}},
    ),
    Situation("split-with-fsdp", "layers split beside shards", {"dp": 2, "fsdp": 2, "options": _SPLIT}),
    Situation(
        "split-beside-replicas",
        "layers split beside replicas of several ranks",
        {"dp": 2, "tp": 2, "options": _SPLIT},
    ),
    Situation(
        "split-degree-divides",
        "layers split over 3 of 4 ranks",
        {"dp": 4, "options": {"split": {"modules": ["head"], "degree": 3}}},
    ),
)
"""One for each rule that no pair of the table breaks."""

LATER: Mapping[str, tuple[str, str, str]] = {
    "comm-hook-needs-ddp": (
        "16-bit gradients, and data parallelism by a plugin of one's own",
        "They are made 16-bit where DistributedDataParallel or a plugin of Paraflow sends them.",
        "Leave comm_hook out.",
    ),
    "optimizer-implementation": (
        "an optimizer without the implementation",
        "The class of the optimizer has no fused, foreach or for-loop implementation, as was asked for.",
        "Leave optimizer_implementation out, or use adam, adamw, adagrad or sgd.",
    ),
    "apply-groups-optimizer": (
        "an optimizer that looks at all parameters at once",
        "Applied to some parameters at a time, it would do something else.",
        "Leave apply_groups out, or use one of torch's optimizers, such as adamw.",
    ),
    "offload-whole-parameters": (
        "an optimizer that looks at whole parameters, sharded and on the host",
        "A rank has shards on the host, and the optimizer needs the whole.",
        "Use an optimizer that treats elements one by one, such as adamw, or leave cpu_offload out.",
    ),
    "offload-pattern": (
        "a pattern in cpu_offload that matches nothing",
        "No module of that name has parameters.",
        "Choose from the names of modules that the message lists.",
    ),
    "backward-apply-hooks": (
        "an optimizer with a hook before its step, applied in backward",
        "Parameters are updated before there is a step.",
        "Write apply_groups=8, or remove the hook.",
    ),
    "backward-apply-nan-guard": (
        "NaNGuard, and apply in backward",
        "It looks at all gradients before the optimizer steps, and there they have been used already.",
        "Write apply_groups=8, or leave NaNGuard out.",
    ),
}
"""Refusals that need the model, its optimizer or the callbacks: situation, reason, remedy."""
