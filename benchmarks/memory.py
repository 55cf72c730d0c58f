"""What sharding, group-wise apply and sharded saves take of memory, beside the formula and a plain torch script.

    python benchmarks/memory.py              # everything
    python benchmarks/memory.py --only sharding time --check     # exit code 1 where a bar is missed
    python benchmarks/memory.py --small      # a model of 0.9 million parameters, to try the benchmark itself

The model: a `CausalLM` of 100,008,192 parameters in fp32 (13 blocks of 768 features, 10,240 tokens, embedding tied),
AdamW. The largest unit is what no block holds, 7.9 M parameters, almost all of them the embedding, which is the largest
parameter, too: a thirteenth of all. Four ranks on gloo, two sequences of 16 tokens each, so activations are small.

Bytes are those of torch's allocator, exact (allocations.py says how they are told apart); of the ranks' the most.
Model states are parameters, gathered parameters, gradients and the optimizer's state.

The formula is that of Rajbhandari et al. 2020 (ZeRO), section 5, for fp32: with P parameters on N ranks a rank holds,
in bytes, 4 P + 4 P + 8 P / N (zero 1: parameters, gradients, the optimizer's shard), 4 P + 12 P / N (zero 2) or
16 P / N (zero 3). `fully_shard` differs in two ways. Between steps parameters and gradients are sharded at every level,
so that a rank holds 16 P / N. Within a step zero 1 and 2 hold gathered parameters (4 P) beside their shards
(4 P / N), which the formula does not have, and each level has a unit or two of whole gradients that wait to be reduced.
The whole gradients of zero 1 are there with more than one micro-batch only, so that row has two.

The plain script (`Plain` in sharded_training.py) is `fully_shard` on each block and on the model, and torch's AdamW on
the sharded parameters. Its micro-batches, units and batches are the same. Step times are taken in turns, a step each,
in the same processes and from one meeting of the ranks to the next; ratios within each turn.

What each flag saves is shown on another model (memory_flags.py), of 27 M parameters and 8 × 128 tokens, so that
activations weigh as they do in practice. Each kind's most is at a moment of its own; the peak is of all at once.
Here the host is the device, too: what a plan keeps on the host is told apart and counted as the host's.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # the profiler warns of memory that is older than it
os.environ["KINETO_LOG_LEVEL"] = "99"

import torch
from allocations import ACTIVATIONS, GRADIENTS, OPTIMIZER, TRANSIENT, Followed
from memory_flags import measure_flags
from overhead import machine
from rich.console import Console
from rich.table import Table
from saving import Clock
from sharded_training import RANKS, SHAPE, SMALL, Plain, Shape, fit, follow, sizes, take_turns

import paraflow as pf
from paraflow.checkpoint.tensors import BUCKET

BATCH_SIZE = 8
GROUPS = 8
MB = 1e6
PARTS = ("sharding", "groups", "saving", "time", "flags")
PLAIN_BAR, FORMULA_BAR, GROUPS_BAR, TIME_BAR, SAVING_BAR = 1.05, 1.10, 6.0, 1.03, 1.2


@dataclass(frozen=True)
class Rank:
    """What one rank measured.

    Attributes:
        sharding: What a step took, by zero level and contender.
        groups: What the optimizer's step took beside what was there, by the number of groups.
        saving: What a save took beside what was there, save by save.
        turns: Seconds of a plain step and of Paraflow's, turn by turn.
    """

    sharding: dict[tuple[int, str], Followed]
    groups: dict[int, int]
    saving: list[int]
    turns: list[tuple[float, float]]


def measure(shape: Shape, parts: list[str], turns: int, folder: str) -> Rank:
    """Measures on this rank; every rank calls it."""
    torch.set_num_threads(1)
    return Rank(
        _sharding(shape) if "sharding" in parts else {},
        {groups: _update(shape, groups) for groups in (1, GROUPS)} if "groups" in parts else {},
        _save(shape, Path(folder)) if "saving" in parts else [],
        take_turns(shape, BATCH_SIZE, turns) if "time" in parts else [],
    )


def _sharding(shape: Shape) -> dict[tuple[int, str], Followed]:
    found = {}
    for zero in (1, 2, 3):
        micro_batches = 2 if zero == 1 else 1
        found[zero, "paraflow"] = follow(shape, BATCH_SIZE, fsdp=RANKS, zero=zero, accumulate=micro_batches)
        gc.collect()
        found[zero, "plain"] = Plain(shape, BATCH_SIZE, zero, micro_batches).follow()
        gc.collect()
    return found


def _update(shape: Shape, groups: int) -> int:
    # The for-each AdamW, torch's default on a GPU: its temporaries are as large as all that it is applied to.
    plan: dict[str, Any] = {"fsdp": RANKS, "apply_groups": groups, "optimizer_implementation": "foreach"}
    followed = follow(shape, BATCH_SIZE, **plan)
    gc.collect()
    return followed.update


def _save(shape: Shape, folder: Path) -> list[int]:
    clock = Clock()
    callbacks = [clock.before, pf.callbacks.Checkpoint(folder, 1), clock.after]
    fit(shape, BATCH_SIZE, 3, callbacks, fsdp=RANKS)
    gc.collect()
    return [extra for _, extra in clock.extra]


def formula(parameters: int, zero: int) -> float:
    """Returns the bytes of model states on a rank in the middle of a step.

    Example:
        >>> formula(4, 1), formula(4, 2), formula(4, 3)
        (40.0, 28.0, 16.0)
    """
    whole = {1: 4 + 4, 2: 4, 3: 0}[zero]
    return parameters * (whole + (16 - whole) / RANKS)


class Report:
    """Prints tables, and knows whether every bar was met."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.met = True

    def check(self, holds: bool) -> str:
        """Returns how a bar is said to have fared."""
        self.met &= holds
        return "[green]met[/]" if holds else "[red]not met[/]"

    def table(self, title: str, *columns: str) -> Table:
        """Returns an empty table; its first column is words."""
        table = Table("", *columns, title=title, title_justify="left")
        for column in table.columns[1:]:
            column.justify = "right"
        return table

    def sharding(self, ranks: list[Rank], parameters: int, unit: int) -> None:
        """Prints model states and peaks beside the formula and the plain script."""

        def most(zero: int, who: str, of: Callable[[Followed], int]) -> int:
            return max(of(rank.sharding[zero, who]) for rank in ranks)

        between = self.table("Model states between steps, MB a rank", "Paraflow", "plain", "16 P / N", "÷ plain", "")
        within = self.table(
            "The most within a step, MB a rank", "states", "plain", "formula + unit", "÷ plain", "÷ formula + unit", "",
            "all", "all, plain",
        )  # fmt: skip
        for zero in (1, 2, 3):
            ours, theirs = (most(zero, who, lambda one: sum(one.before.values())) for who in ("paraflow", "plain"))
            even = 16 * parameters / RANKS
            fared = self.check(ours <= PLAIN_BAR * theirs and ours <= FORMULA_BAR * (even + 4 * unit))
            between.add_row(f"zero {zero}", *_mb(ours, theirs, even), f"{ours / theirs:.3f}", fared)
            ours, theirs = (most(zero, who, lambda one: one.states) for who in ("paraflow", "plain"))
            bound = formula(parameters, zero) + 4 * unit
            fared = self.check(ours <= PLAIN_BAR * theirs and ours <= FORMULA_BAR * bound)
            peaks = _mb(*(most(zero, who, lambda one: one.peak) for who in ("paraflow", "plain")))
            within.add_row(
                f"zero {zero}", *_mb(ours, theirs, bound), f"{ours / theirs:.3f}", f"{ours / bound:.3f}", fared, *peaks
            )
        self.console.print(between, within, f"bars: ≤ {PLAIN_BAR} × plain, ≤ {FORMULA_BAR} × (formula + largest unit)")

    def groups(self, ranks: list[Rank]) -> None:
        """Prints what the optimizer's step takes."""
        whole, grouped = (max(rank.groups[groups] for rank in ranks) for groups in (1, GROUPS))
        table = self.table("The optimizer's transient, MB a rank", "k = 1", f"k = {GROUPS}", "less by", "bar", "")
        fared = self.check(whole >= GROUPS_BAR * grouped)
        table.add_row("AdamW, for-each", *_mb(whole, grouped), f"{whole / grouped:.2f} ×", f"≥ {GROUPS_BAR:g} ×", fared)
        self.console.print(table)

    def saving(self, ranks: list[Rank]) -> None:
        """Prints what a save takes."""
        table = self.table("A sharded save's peak extra memory", "MB a rank", "buckets", "bar", "")
        for place, extras in enumerate(zip(*(rank.saving for rank in ranks), strict=True)):
            share = max(extras) / BUCKET
            fared = self.check(share <= SAVING_BAR)
            table.add_row(f"save {place + 1}", *_mb(max(extras)), f"{share:.3f}", f"≤ {SAVING_BAR:g}", fared)
        self.console.print(table)

    def time(self, ranks: list[Rank]) -> None:
        """Prints how long a step takes."""
        turns = ranks[0].turns
        ratios = sorted(ours / plain for plain, ours in turns)
        low, middle, high = statistics.quantiles(ratios, n=4)
        table = self.table(
            f"A step, zero 3, {len(turns)} turns", "plain, s", "Paraflow, s", "ratio", "quartiles", "bar", ""
        )
        seconds = (statistics.median(turn[who] for turn in turns) for who in (0, 1))
        fared = self.check(middle <= TIME_BAR)
        cells = [f"{middle:.3f}", f"{low:.3f}–{high:.3f}", f"≤ {TIME_BAR}"]
        table.add_row("", *(f"{second:.3f}" for second in seconds), *cells, fared)
        self.console.print(table)

    def flags(self, rows: dict[int, list[tuple[str, Followed]]]) -> None:
        """Prints what each flag saves."""
        columns = ("parameters", GRADIENTS, OPTIMIZER, ACTIVATIONS, TRANSIENT, "peak", "on the host")
        table = self.table("The most of each kind in a step, and of all at once, MB a rank", *columns)
        for ranks, followed in rows.items():
            table.add_section()
            for title, one in followed:
                kinds = (one.most[kind] for kind in (GRADIENTS, OPTIMIZER, ACTIVATIONS, TRANSIENT))
                host = _mb(one.host)[0] if one.host else ""
                table.add_row(f"{ranks} × {title}", *_mb(one.parameters, *kinds, one.peak), host)
        self.console.print(table)


def _mb(*sizes: float) -> list[str]:
    return [f"{size / MB:.1f}" for size in sizes]


def parse() -> Any:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="What sharding, offload and recomputation take of memory.")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--small", action="store_true", help="a small model, to try the benchmark itself")
    parser.add_argument("--turns", type=int, default=16, help="steps that are timed of each")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; by default the temporary folder")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is not met")
    return parser.parse_args()


def main() -> int:
    """Measures what was asked for, and returns the exit code."""
    given = parse()
    console = Console(width=None if sys.stdout.isatty() else 160)
    shape = SMALL if given.small else SHAPE
    parameters, unit, largest = sizes(shape.model())
    console.print(machine(), highlight=False)
    console.print(
        f"{parameters:,} parameters; the largest unit {unit:,}, the largest parameter {largest:,} "
        f"(1 / {parameters / largest:.1f})",
        highlight=False,
    )
    if given.small:
        console.print("the bars are those of the large model")
    report, parts = Report(console), [part for part in given.only if part != "flags"]
    if parts:
        with tempfile.TemporaryDirectory(prefix="paraflow-memory-", dir=given.folder) as folder:
            ranks = pf.spawn(measure, RANKS, (shape, parts, given.turns, folder))
        if "sharding" in parts:
            report.sharding(ranks, parameters, unit)
        for part in [part for part in parts if part != "sharding"]:
            getattr(report, part)(ranks)
    if "flags" in given.only:
        report.flags(measure_flags(given.small))
    return 1 if given.check and not report.met else 0


if __name__ == "__main__":
    sys.exit(main())
