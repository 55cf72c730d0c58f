"""A classifier of very many classes: the features data-parallel, the classifier split over the same ranks.

    python examples/classification_100k.py                              one process; the scopes change nothing
    paraflow launch -n 4 examples/classification_100k.py                replica and split, over four ranks
    paraflow launch -n 4 examples/classification_100k.py --plain        the same, data-parallel

With 100,000 classes nearly all parameters are the classifier's. Data parallelism sends the gradients of all of them in
each step. Split, each rank holds the weights of some of the classes, and no gradient of them is sent: what moves are
the features of the batch, a few numbers per image for the softmax, and the features' gradients. The training run is the
same. It prints the time of a step, and what a host sends in one (`benchmarks/hosts.py` makes hosts on one machine).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import paraflow as pf

FEATURES = 512


class Net(pf.Model):
    def __init__(self, classes: int, plain: bool = False) -> None:
        super().__init__()
        with nullcontext() if plain else pf.replica():
            self.features = nn.Sequential(
                nn.Conv2d(3, 32, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.Conv2d(32, 64, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.Conv2d(64, 128, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.Conv2d(128, FEATURES, 1),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
            )
        with nullcontext() if plain else pf.split():
            self.head = nn.Linear(FEATURES, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images))


def make_images(number: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise of a colour that tells the class: images [number, 3, 32, 32] of fp32 and classes [number] of int64."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (number,), generator=generator)
    colours = torch.stack([labels * step % 101 / 50.5 - 1 for step in (1, 7, 31)], dim=1)
    return colours[:, :, None, None] + 0.1 * torch.randn(number, 3, 32, 32, generator=generator), labels


class StepTimes(pf.Callback):
    """Notes when each step begins, and how many bytes this host had sent by then."""

    def __init__(self) -> None:
        self.began: list[tuple[float, int]] = []

    def on_step_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.began.append((time.perf_counter(), sent_by_host()))

    def medians(self) -> tuple[float, float]:
        """Seconds and bytes of a step; the first is left out, since ranks make their connections in it."""
        steps = list(pairwise(self.began[1:]))
        seconds = statistics.median(after[0] - before[0] for before, after in steps)
        return seconds, statistics.median(after[1] - before[1] for before, after in steps)


def sent_by_host() -> int:
    """The bytes that have left through the network card that gloo uses; 0 where none is named."""
    card = Path("/sys/class/net", os.environ.get("GLOO_SOCKET_IFNAME", "-"), "statistics/tx_bytes")
    return int(card.read_text()) if card.exists() else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    quick = os.environ.get("PARAFLOW_QUICK") == "1"
    parser.add_argument("--classes", type=int, default=1000 if quick else 100_000, help="default 100000; quick 1000")
    parser.add_argument("--images", type=int, default=64, help="images of a step, over all ranks (default 64)")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps (default 10)")
    parser.add_argument("--plain", action="store_true", help="without scopes: data parallel")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    pf.seed(0)
    model = Net(arguments.classes, arguments.plain)
    model.configure(optimizer="sgd", lr=0.1, loss="cross_entropy")
    times = StepTimes()
    trainer = pf.Trainer(max_steps=arguments.steps, optimizer_implementation="fused", callbacks=[times])
    data = make_images(8 * arguments.images, arguments.classes)
    trainer.fit(model, data, batch_size=arguments.images)
    if pf.is_main():
        seconds, sent = times.medians()
        print(f"{arguments.classes:,} classes on {pf.world_size()} ranks: {seconds:.3f} s a step")
        if sent:
            print(f"sent by this host: {sent / 1e6:.1f} MB a step")


if __name__ == "__main__":
    main()
