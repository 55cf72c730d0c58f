"""Strong scaling: the same batch of a compute-bound model on one host and on two, each with one core.

    python benchmarks/scaling.py

It needs root; see benchmarks/hosts.py. Paraflow and a hand-written DistributedDataParallel loop take turns, a step
each, on the same ranks. Efficiency is the seconds on one host over twice those on two.
"""

from __future__ import annotations

import argparse
import os
import sys
from itertools import pairwise
from typing import Any

import torch
from host_turns import BesideFit, Steps, Taken, read, tell
from hosts import Hosts, HostsError, in_bytes, warn_if_busy
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import paraflow as pf

IMAGES, LEARNING_RATE = 128, 0.05
NAMES = ("by hand", "by Paraflow")


def make_model() -> nn.Module:
    """Convolutions of few weights over many pixels: 261,450 parameters, 39 million multiplications an image."""
    widths = [3, 64, 64, 128, 128]
    layers: list[nn.Module] = []
    for place, (before, after) in enumerate(pairwise(widths)):
        layers += [nn.Conv2d(before, after, 3, stride=1 + place % 2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def make_data(images: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [images, 3, 32, 32] of fp32 and classes [images] of int64."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(images, 3, 32, 32, generator=generator)
    return inputs, torch.randint(10, (images,), generator=generator)


def by_hand() -> Steps:
    """The loop a careful person writes; on one host without DistributedDataParallel."""
    torch.manual_seed(0)
    model, ranks = make_model(), pf.world_size()
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True) if ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, fused=True)
    images, classes = make_data(IMAGES // ranks)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(replica(images), classes).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return {NAMES[0]: step}


def fit(turns: int) -> None:
    """One rank's fit, with the loop by hand beside it."""
    pf.seed(0)
    model = pf.configure(make_model(), optimizer="sgd", lr=LEARNING_RATE, loss="cross_entropy")
    options: dict[str, Any] = {"optimizer_implementation": "fused", "progress": False, "device": "cpu"}
    trainer = pf.Trainer(max_steps=turns + 2, callbacks=[BesideFit(NAMES[1], by_hand, tell)], **options)
    trainer.fit(model, make_data(4 * IMAGES), batch_size=IMAGES)


def measure(rate: str, number: int, turns: int) -> dict[str, Taken]:
    """Returns what both take on so many hosts.

    Raises:
        HostsError: The ranks failed.
    """
    with Hosts(number, rate) as hosts:
        run = hosts.run([__file__, "--turns", str(turns)], show=False)
    if run.status:
        raise HostsError(f"The ranks ended with status {run.status}:\n{run.output[-4000:]}")
    return read(run.output)


def show(one: dict[str, Taken], two: dict[str, Taken], rate: str) -> None:
    """Prints a table."""
    table = Table("", "s a step, 1 host", "2 hosts", "efficiency", "a host sends", title=f"{IMAGES} images, at {rate}")
    for name in NAMES:
        single, double = one[name].median, two[name].median
        efficiency = f"{single / (2 * double):.0%}"
        table.add_row(name, f"{single:.3f}", f"{double:.3f}", efficiency, in_bytes(max(two[name].sent)))
    console = Console(width=120)
    console.print(table)
    for number, taken in ((1, one), (2, two)):
        ratio = taken[NAMES[1]].median / taken[NAMES[0]].median
        console.print(f"on {number}: Paraflow takes {ratio:.3f} of the seconds by hand", highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="what each host may send and receive (default 1gbit)")
    parser.add_argument("--turns", type=int, default=20, help="steps of each that are counted (default 20)")
    arguments = parser.parse_args()
    if "RANK" in os.environ:  # on a host
        fit(arguments.turns)
        return 0
    warn_if_busy()
    try:
        one, two = (measure(arguments.rate, number, arguments.turns) for number in (1, 2))
    except HostsError as error:
        print(f"scaling: {error}", file=sys.stderr)
        return 2
    show(one, two, arguments.rate)
    return 0


if __name__ == "__main__":
    sys.exit(main())
