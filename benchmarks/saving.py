"""What a checkpoint costs: how long the loop waits for it, at once and in the background, and its memory.

    python benchmarks/saving.py              # one process and two: five minutes
    python benchmarks/saving.py --check      # exits with 1 where a bar is not met

A model of 60 million parameters in float32 with the state of AdamW: 718 MB, the largest tensor 67 MB. `Checkpoint`
saves six times, first in the loop and then in the background, in the same process with the same model, under `fit`.

How long the loop waits is what passes between a callback before Checkpoint and one after it, at the event at which it
saves. In the background it includes waiting for the save before, if that is not done; so that it is, the loop takes as
many steps from one save to the next as fill twice the time of the first save in the loop. The writing is not free: it
shares processors with the steps meanwhile, which is not counted as waiting.

The peak of memory is the kernel's high-water mark of the process's resident memory (VmHWM, set back before a save in
the loop), less what was resident before it. On two ranks it is rank 0's, which writes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from overhead import machine
from rich.console import Console
from rich.table import Table
from torch import nn

import paraflow as pf

WIDTH, LAYERS = 4096, 3
SAVES = 6  # the first, and five whose median is taken
WAIT_BAR = 0.1
MEMORY_BAR = 1.0


@dataclass(frozen=True)
class Measured:
    """What rank 0 measured.

    Attributes:
        parameters: Of the model.
        waits: Seconds that the loop waited for each save, by kind: in the loop, in the background.
        steps: The median step's seconds, by kind.
        memory: The most that a save in the loop took beside the state, in units of the largest tensor.
    """

    parameters: int
    waits: tuple[list[float], list[float]]
    steps: tuple[float, float]
    memory: float


def resident(field: str) -> int:
    """The process's resident memory in bytes: VmRSS, or its peak, VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


class Clock:
    """Times what lies between its two callbacks, `before` and `after` another one."""

    def __init__(self) -> None:
        self.waits: list[tuple[int, float]] = []
        self.steps: list[float] = []
        self.extra: list[tuple[int, int]] = []
        self._began = self._step_began = 0.0
        self._resident = 0
        clock = self

        class Before(pf.Callback):
            def on_step_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
                clock._step_began = time.perf_counter()

            def on_checkpoint(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
                clock.steps.append(time.perf_counter() - clock._step_began)
                trainer.mesh.barrier()  # what is waited for a slower rank is not waited for the save
                Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to what is resident now
                clock._resident = resident("VmRSS")
                clock._began = time.perf_counter()

        class After(pf.Callback):
            def on_checkpoint(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
                clock.waits.append((trainer.step, time.perf_counter() - clock._began))
                clock.extra.append((trainer.step, resident("VmHWM") - clock._resident))

        self.before, self.after = Before(), After()


def make_model() -> nn.Module:
    """Returns the model: 60 million parameters in four large tensors and small ones."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(512, WIDTH)]
    for _ in range(LAYERS):
        layers += [nn.ReLU(), nn.Linear(WIDTH, WIDTH)]
    layers += [nn.ReLU(), nn.Linear(WIDTH, 1792)]
    return pf.configure(nn.Sequential(*layers), optimizer="adamw", lr=1e-5, loss="cross_entropy")


def train(model: nn.Module, folder: Path, every: int, *, background: bool, saves: int) -> Clock:
    """Trains until so many checkpoints were saved."""
    clock, steps = Clock(), every * saves + 1  # at the last one the run would wait for what is in the background
    checkpoint = pf.callbacks.Checkpoint(folder, every, background=background)
    callbacks = [clock.before, checkpoint, clock.after]
    trainer = pf.Trainer(max_steps=steps, progress=False, callbacks=callbacks, device="cpu")
    pf.seed(0)
    data = torch.randn(8 * steps, 512), torch.randint(0, 1792, (8 * steps,))
    trainer.fit(model, data, batch_size=8)
    return clock


def measure(folder: str) -> Measured:
    """Measures both kinds of saves on this rank; every rank calls it."""
    torch.set_num_threads(1)
    model, place = make_model(), Path(folder)
    first = train(model, place / "first", 2, background=False, saves=1)
    # Steps that fill twice the time of a save; rank 0 decides for all.
    save, step = dict(first.waits)[2], statistics.median(first.steps)
    every = torch.tensor([max(2, round(2 * save / step))])
    if torch.distributed.is_initialized():
        torch.distributed.broadcast(every, 0)
    interval = int(every.item())
    clocks = [
        train(model, place / str(background), interval, background=background, saves=SAVES)
        for background in (False, True)
    ]
    due = range(interval, interval * SAVES + 1, interval)
    waits = tuple([dict(clock.waits)[step] for step in due] for clock in clocks)
    largest = max(parameter.nbytes for parameter in model.parameters())
    extra = max(dict(clocks[0].extra)[step] for step in due) / largest
    steps = tuple(statistics.median(clock.steps) for clock in clocks)
    return Measured(sum(p.numel() for p in model.parameters()), waits, steps, extra)  # type: ignore[arg-type]


def measure_ranks(ranks: int, parent: Path | None) -> Measured:
    """Measures in processes of their own, so that memory is that of this one measurement."""
    with tempfile.TemporaryDirectory(prefix="paraflow-saving-", dir=parent) as folder:
        measured: Measured = pf.spawn(measure, ranks, (folder,))[0]
    return measured


def _median(waits: list[float]) -> float:
    return statistics.median(waits[1:])


def print_table(all_measured: dict[int, Measured], console: Console) -> bool:
    """Prints what was measured; whether every bar is met."""
    met, table = True, Table("", "one process", "two processes", "bar", title="Saving", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    rows: list[tuple[str, Any, float | None]] = [
        ("in the loop: the first save, s", lambda m: m.waits[0][0], None),
        ("in the loop: median of five, s", lambda m: _median(m.waits[0]), None),
        ("in the background: the first save, s", lambda m: m.waits[1][0], None),
        ("in the background: median of five, s", lambda m: _median(m.waits[1]), None),
        ("ratio of the first saves", lambda m: m.waits[1][0] / m.waits[0][0], WAIT_BAR),
        (
            "ratio of the medians",
            lambda m: _median(m.waits[1]) / _median(m.waits[0]),
            WAIT_BAR,
        ),
        ("peak memory of a save in the loop, largest tensors", lambda m: m.memory, MEMORY_BAR),
        ("a step while saves are in the loop, s", lambda m: m.steps[0], None),
        ("a step while they are in the background, s", lambda m: m.steps[1], None),
    ]
    for title, of, bar in rows:
        numbers = {ranks: of(measured) for ranks, measured in all_measured.items()}
        met &= bar is None or all(number <= bar for number in numbers.values())
        cells = [
            ""
            if ranks not in numbers
            else f"[{'red' if bar and numbers[ranks] > bar else 'default'}]{numbers[ranks]:.3f}"
            for ranks in (1, 2)
        ]
        table.add_row(title, *cells, "" if bar is None else f"≤ {bar:g}")
    console.print(table)
    return met


def main() -> int:
    """Measures what was asked for, and returns the exit code."""
    parser = argparse.ArgumentParser(description="What a checkpoint costs a training.")
    parser.add_argument("--ranks", type=int, nargs="+", choices=(1, 2), default=[1, 2], help="processes")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; by default the temporary folder")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is not met")
    given = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(machine(), highlight=False)
    measured = {ranks: measure_ranks(ranks, given.folder) for ranks in given.ranks}
    console.print(f"{next(iter(measured.values())).parameters:,} parameters", highlight=False)
    met = print_table(measured, console)
    return 1 if given.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
