"""What each flag saves on one model: one rank's bytes at the moment of a step at which its device holds most."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from allocations import ACTIVATIONS, Followed, marked_as_host
from sharded_training import RANKS, Shape, follow, sizes

import paraflow as pf

FLAGS_SHAPE = Shape(vocab=4096, hidden=512, layers=8, tokens=128)
FLAGS_SMALL = Shape(vocab=512, hidden=128, layers=4, tokens=64)
BATCH_SIZE = 8
STATE_BYTES = 16
"""Of a parameter in fp32 under AdamW: the parameter, its gradient, two moments."""

BUDGET_SHARE = 0.6
"""Of the activations that a plan without flags keeps, what the budget of ``"auto"`` has room for beside the state."""


@dataclass(frozen=True)
class Flag:
    """A row of the table.

    Attributes:
        title: As it is written.
        plan: The fields.
        offloaded: What lives on the host.
    """

    title: str
    plan: dict[str, Any] = field(default_factory=dict)
    offloaded: str | None = None


ALONE = [
    Flag("nothing"),
    Flag("accumulate=4", {"accumulate": 4}),
    Flag('activation_checkpointing="selective"', {"activation_checkpointing": "selective"}),
    Flag('activation_checkpointing="full"', {"activation_checkpointing": "full"}),
    Flag('activation_checkpointing="auto"', {"activation_checkpointing": "auto"}),
    Flag('activation_checkpointing="offload"', {"activation_checkpointing": "offload"}),
    Flag('cpu_offload="optimizer"', {"cpu_offload": "optimizer"}, "optimizer"),
    Flag('cpu_offload="params"', {"cpu_offload": "params"}, "params"),
    Flag("apply_groups=8", {"apply_groups": 8}),
    Flag('apply_groups="backward"', {"apply_groups": "backward"}),
    Flag(
        'activation_checkpointing="full", apply_groups=8',
        {"activation_checkpointing": "full", "apply_groups": 8},
    ),
    Flag(
        'activation_checkpointing="full", cpu_offload="params", apply_groups=8',
        {"activation_checkpointing": "full", "cpu_offload": "params", "apply_groups": 8},
        "params",
    ),
]
TOGETHER = [
    Flag("dp=4", {"dp": 4}),
    Flag("fsdp=4, zero=1", {"fsdp": 4, "zero": 1}),
    Flag("fsdp=4, zero=2", {"fsdp": 4, "zero": 2}),
    Flag("fsdp=4", {"fsdp": 4}),
    Flag(
        'fsdp=4, activation_checkpointing="full", apply_groups=8',
        {"fsdp": 4, "activation_checkpointing": "full", "apply_groups": 8},
    ),
]


def follow_flags(small: bool, ranks: int) -> list[tuple[str, Followed]]:
    """Follows a step under each flag on this rank; every rank calls it.

    AdamW is torch's for-each one, as is its default on a GPU: its temporaries are those of all parameters at once.
    """
    from paraflow.recompute import offload

    torch.set_num_threads(2 if ranks == 1 else 1)
    shape = FLAGS_SMALL if small else FLAGS_SHAPE
    found: list[tuple[str, Followed]] = []
    for flag in ALONE if ranks == 1 else TOGETHER:
        plan = {"optimizer_implementation": "foreach", **flag.plan}
        title = flag.title
        if plan.get("activation_checkpointing") == "auto":
            state = STATE_BYTES * sizes(shape.model())[0]
            plan["memory_budget"] = int(state + BUDGET_SHARE * found[0][1].most[ACTIVATIONS])
            title += f", memory_budget={plan['memory_budget'] / 1e6:.0f} MB"
        with ExitStack() as stack:
            if plan.get("activation_checkpointing") == "offload":
                stack.enter_context(marked_as_host(offload._Link, "to_host"))
            found.append((title, follow(shape, BATCH_SIZE, flag.offloaded, **plan)))
        gc.collect()
    return found


def measure_flags(small: bool) -> dict[int, list[tuple[str, Followed]]]:
    """Returns what a step took under each flag, by the number of ranks: of the rank that took most."""
    return {ranks: most_by_rank(pf.spawn(follow_flags, ranks, (small, ranks))) for ranks in (1, RANKS)}


def most_by_rank(ranks: list[list[tuple[str, Followed]]]) -> list[tuple[str, Followed]]:
    """Returns each row of the rank whose peak is the highest."""
    return [max(rows, key=lambda row: row[1].peak) for rows in zip(*ranks, strict=True)]
