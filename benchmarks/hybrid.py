"""Hybrid parallelism on four hosts with a slow network, beside the same by hand and beside data parallelism.

    python benchmarks/hybrid.py                    all three: some minutes, on a machine that does nothing else
    python benchmarks/hybrid.py bert --rate 300mbit
    python benchmarks/hybrid.py --by-hand          without Paraflow

It needs root; see benchmarks/hosts.py. In each case Paraflow and the version by hand take turns, a step each, on the
same ranks; so do Paraflow's and the hand-written data parallelism. Printed are medians of seconds a step, what a host
sends in one, the share of a step in which it sends at the network's rate, and the seconds a rank is on a core. Beside
the data parallelism stands what the same ranks take when nothing is exchanged: the rest of its step is communication.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from host_turns import Taken, read
from hosts import Hosts, HostsError, bits_per_second, in_bytes, warn_if_busy
from rich.console import Console
from rich.table import Table

CASES = {
    "classification": ("hybrid", ["1gbit"], "64 images, 512 features, 100,000 classes"),
    "bert": ("pipeline", ["1gbit", "300mbit"], "BERT, 24 layers of 256, 8 × 64 tokens, 2 stages × 2 replicas"),
}
# Data parallelism takes seconds a step, and its ratio to the hybrid is far from 1.
TURNS = {"hybrid": 16, "pipeline": 12, "plain": 6}


def measure(hosts: Hosts, case: str, by_hand: bool, sizes: list[str]) -> dict[str, Taken]:
    """Returns what each contender of a case takes on the hosts.

    Raises:
        HostsError: The ranks failed.
    """
    taken: dict[str, Taken] = {}
    for plain in (False, True):
        turns = TURNS["plain" if plain else CASES[case][0]]
        words = [str(Path(__file__).with_name("hybrid_ranks.py")), case, f"--turns={turns}", *sizes]
        words += ["--plain"] * plain + ["--by-hand"] * by_hand
        run = hosts.run(words, show=False)
        if run.status:
            raise HostsError(f"The ranks ended with status {run.status}:\n{run.output[-4000:]}")
        taken.update(read(run.output))
    return taken


def ratios(taken: dict[str, Taken], name: str) -> list[str]:
    """Returns what the seconds say, in sentences."""
    seconds = {contender: value.median for contender, value in taken.items()}
    whole, said = "data parallel by hand", []
    for by in ("hand", "Paraflow"):
        if f"{name} by {by}" in seconds:
            said.append(f"{name} by {by}: {seconds[whole] / seconds[f'{name} by {by}']:.2f}× data parallel by hand")
    for kind in (name, "data parallel"):
        if f"{kind} by Paraflow" in seconds:
            pairs = zip(taken[f"{kind} by Paraflow"].seconds, taken[f"{kind} by hand"].seconds, strict=False)
            over = sorted(ours / theirs for ours, theirs in pairs)
            ratio = seconds[f"{kind} by Paraflow"] / seconds[f"{kind} by hand"]
            said.append(
                f"{kind}: Paraflow takes {ratio:.3f} of the seconds by hand (median turn {over[len(over) // 2]:.3f})"
            )
    share = 1 - seconds["computing alone"] / seconds[whole]
    said.append(f"communication is {share:.0%} of data parallel by hand")
    return said


def show(console: Console, taken: dict[str, Taken], title: str, rate: str) -> None:
    """Prints a table."""
    table = Table("", "s a step", "between", "a host sends", "on the wire", "core s a rank", title=title)
    for name, value in taken.items():
        between = f"{min(value.seconds):.3f}–{max(value.seconds):.3f}"
        wire = f"{value.on_the_wire(bits_per_second(rate)):.0%}"
        core = f"{sum(value.computed) / len(value.computed):.3f}"
        table.add_row(name, f"{value.median:.3f}", between, in_bytes(max(value.sent)), wire, core)
    console.print(table)


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="which (default: all)")
    parser.add_argument("--hosts", type=int, default=4, help="how many (default 4)")
    parser.add_argument("--rate", help="only at this rate")
    parser.add_argument("--by-hand", action="store_true", help="without Paraflow")
    return parser.parse_known_args()


def main() -> int:
    arguments, sizes = parse()
    console = Console(width=120)
    warn_if_busy()
    for case in arguments.cases or CASES:
        name, rates, title = CASES[case]
        for rate in [arguments.rate] if arguments.rate else rates:
            try:
                with Hosts(arguments.hosts, rate) as hosts:
                    taken = measure(hosts, case, arguments.by_hand, sizes)
            except HostsError as error:
                print(f"hybrid: {error}", file=sys.stderr)
                return 2
            show(console, taken, " ".join([title, *sizes, f"on {arguments.hosts} hosts at {rate}"]), rate)
            console.print("\n".join(ratios(taken, name)), highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
