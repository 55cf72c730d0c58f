"""Chosen recomputation against keeping all, recomputing all, and every-root-n, on three shapes of model.

For each shape and budget, the cost model chooses what becomes of each block. What it chose, and the rules of thumb, are
run in one process, turn by turn; the peak of a step's memory besides parameters and gradients is exact, from torch's
record of each allocation. A choice must meet every budget that can be met, and be the fastest of all that meet it; a
difference no larger than that between two copies of keeping all, in the median of the rounds, is none. Seconds are
processor time of one thread, so that what else the machine does is not in them.

    OMP_NUM_THREADS=1 python benchmarks/recomputation.py [--rounds 9] [--small]
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from recomputed_models import Chain, pyramid, transformer, unet

from paraflow.planner.recomputation import Cut, Profile, Treatment, choose
from paraflow.profiler.blocks import measure
from paraflow.recompute import TreatedBlocks

SHARES = (0.75, 0.5, 0.25, 0.0)
"""Budgets: so far between the least that can be met and what keeping all takes."""


@dataclass
class Contender:
    """A way to run a step.

    Attributes:
        name: What it is called.
        step: Runs forward and backward.
        around: What it is run in.
        predicted: What the cost model says of it, where it was asked.
    """

    name: str
    step: Callable[[], Any]
    around: AbstractContextManager[Any] = field(default_factory=nullcontext)
    predicted: Cut | None = None
    peak: int = 0
    seconds: list[float] = field(default_factory=list)

    def run(self) -> float:
        with self.around:
            began = time.process_time()
            self.step()
            return time.process_time() - began

    def measure_peak(self) -> None:
        """Runs a step and follows each allocation and release; nothing that is there before it counts."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            self.run()
        now = most = 0
        for size in _allocations(profiler):
            now += size
            most = max(most, now)
        self.peak = most


def _allocations(profiler: Any) -> list[int]:
    from torch._C._profiler import _EventType

    found, left = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while left:
        event = left.pop()
        left += event.children
        if event.tag == _EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    return [size for _, size in sorted(found, key=lambda one: one[0])]


def contenders(chain: Chain, profile: Profile) -> tuple[list[Contender], dict[str, int]]:
    """The rules of thumb, and a choice for each budget."""

    def treated(name: str, treatments: Mapping[str, Treatment], predicted: Cut | None = None) -> Contender:
        blocks = TreatedBlocks()
        blocks.treat(chain.blocks, treatments, min_bytes=2**16)
        return Contender(name, chain.step, blocks, predicted)

    most = choose(profile, 2**62)
    budgets = {f"auto {share:.0%}": int(most.smallest + share * (most.peak - most.smallest)) for share in SHARES}
    groups = round(math.sqrt(len(chain.blocks)))
    found = [
        Contender("keep all", chain.step, predicted=most),
        Contender("keep all again", chain.step),
        treated("full", dict.fromkeys(chain.blocks, Treatment("recompute"))),
        Contender(f"every root n ({groups} segments)", lambda: chain.in_segments(groups)),
    ]
    for name, budget in budgets.items():
        cut = choose(profile, budget)
        found.append(treated(name, cut.treatments, cut))
    return found, budgets


def compare(chain: Chain, rounds: int) -> bool:
    """Measures all contenders of a shape, prints a table, and returns whether every choice held."""
    chain.step()
    began = time.process_time()
    profile = measure(chain.model, chain.blocks, chain.loss)
    took = time.process_time() - began
    found, budgets = contenders(chain, profile)
    for contender in found:
        for _ in range(3):  # what is recomputed learns in its first forwards
            contender.run()
        contender.measure_peak()
    for _ in range(rounds):
        for contender in found:
            contender.seconds.append(contender.run())
    keep, twin = found[:2]
    noise = _noise(twin, keep)
    print(f"\n{chain.name}: {len(chain.blocks)} blocks, measured in {took:.2f} s; noise {noise:.1%}")
    print(f"{'':26}{'budget':>10}{'peak':>10}{'predicted':>11}{'step':>10}{'ratio':>8}{'predicted':>11}  verdict")
    held = True
    for contender in found:
        verdict = ""
        if contender.name in budgets:
            verdict = _verdict(contender, budgets[contender.name], found[0:1] + found[2:4], keep, noise)
            held &= verdict == "met, fastest"
        _print_row(contender, budgets.get(contender.name), keep, profile, verdict)
    return held


def _verdict(auto: Contender, budget: int, others: list[Contender], keep: Contender, noise: float) -> str:
    if auto.peak > budget:
        return f"NOT MET by {(auto.peak - budget) / budget:.1%}"
    meeting = [_ratio(other, keep) for other in others if other.peak <= budget]
    if meeting and _ratio(auto, keep) > min(meeting) + noise:
        return f"met, SLOWER by {_ratio(auto, keep) - min(meeting):.1%}"
    return "met, fastest"


def _ratio(one: Contender, other: Contender) -> float:
    """Paired by round: what slows the machine for a while slows both."""
    return statistics.median(a / b for a, b in zip(one.seconds, other.seconds, strict=True))


def _noise(twin: Contender, keep: Contender) -> float:
    """How far apart two that are the same come to lie: half of their rounds by no more than this."""
    apart = statistics.median(abs(a / b - 1) for a, b in zip(twin.seconds, keep.seconds, strict=True))
    return max(apart, 0.01)


def _print_row(one: Contender, budget: int | None, keep: Contender, profile: Profile, verdict: str) -> None:
    mib = 2.0**20
    cut = one.predicted
    told = "" if cut is None else f"{cut.peak / mib:.1f}"
    ratio = "" if cut is None else f"{1 + cut.added / cut.seconds:.3f}"
    print(
        f"{one.name:26}{'' if budget is None else f'{budget / mib:.1f}':>10}{one.peak / mib:>10.1f}{told:>11}"
        f"{statistics.median(one.seconds) * 1e3:>8.1f}ms{_ratio(one, keep):>8.3f}{ratio:>11}  {verdict}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contender")
    parser.add_argument("--small", action="store_true", help="models for a quick look")
    parser.add_argument("--shape", help="only this one")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    chains = [make(given.small) for make in (transformer, pyramid, unet) if given.shape in (None, make.__name__)]
    held = [compare(chain, given.rounds) for chain in chains]
    print(f"\nchoices held on {sum(held)} of {len(held)} shapes; sizes in MiB, ratios to keeping all")


if __name__ == "__main__":
    main()
