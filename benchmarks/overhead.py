"""What Paraflow costs beside a hand-written loop and its peers: a training step, the import, a step on two processes.

    python benchmarks/overhead.py            # everything: a quarter of an hour
    python benchmarks/overhead.py --quick    # everything, roughly: three minutes
    python benchmarks/overhead.py --only paraflow paraflow-o1 import

The work: an MLP of 32-64-64-10, batches of 32, AdamW at 1e-3, cross-entropy, one thread, 8192 synthetic samples in
memory, shuffled anew for each epoch. The model is so small that what is measured is what surrounds it.

How a step is measured. Each contender has a process of its own, so that no library's imports, threads and settings
reach another. In that process it takes turns with the hand-written loop, an epoch each: a hook at the beginning of an
epoch runs one epoch of the hand-written loop (see workload.py). Its ratio is taken within each turn, so that a machine
that is slow for a while is slow for both; and within one process, since two processes of the same program differ by
some percent in where their memory lies. The processes go round robin over the contenders for several rounds, and the
median over all turns of all rounds is shown. What `fit` does before its first epoch is not counted; what a trainer
does between epochs is, shared out over the steps. The first epochs of a process are warm-up.

The hand-written loop, which every ratio is to:

    for rows in torch.randperm(len(inputs)).split(32):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs[rows]), targets[rows])
        loss.backward()
        optimizer.step()
        total += loss.detach()

Like Paraflow it knows the mean loss of each epoch, and reads it once an epoch; most peers are run without. It waits for
no number in a step and has no DataLoader; its AdamW is torch's default, as is that of each contender but those that say
otherwise. It is also run against itself, which shows what can be told apart here.

The contenders (contenders.py has the code; "the DataLoader" is DataLoader(TensorDataset(x, y), 32, shuffle=True)):

    hand-written, fused AdamW       the same loop with AdamW(fused=True)
    hand-written, over a DataLoader the same loop over the DataLoader: what the peers' data costs without the peers
    Paraflow                        Trainer(progress=False).fit(model, (x, y), batch_size=32); keeps each epoch's loss
    Paraflow, given a DataLoader    the same given the DataLoader, which Paraflow reads by rows as it does arrays
    Paraflow, auto="O1"             Trainer(auto="O1"), which chooses the fused AdamW here
    Accelerate                      Accelerator(cpu=True), prepare, a hand-written loop with accelerator.backward
    Lightning Fabric                Fabric(accelerator="cpu"), setup, a hand-written loop with fabric.backward
    Ignite                          Engine around a hand-written step that returns nothing
    skorch                          NeuralNet(callbacks="disable", train_split=None, verbose=0), arrays; reads each loss
    Lightning Trainer               Trainer(barebones=True), Lightning's own mode for measuring overhead
    transformers Trainer            no logging, saving, clipping, progress or filter of NaN losses; constant rate
    Keras on torch                  Model.fit(verbose=0, shuffle=True), arrays, no metrics, Keras's own AdamW

Accelerate, Fabric, Ignite and Lightning are given the DataLoader; skorch, transformers and Keras make their own.

Import: a fresh interpreter per import, in turn, timed inside it; Paraflow's loads the Trainer, as any use of it does.

Two processes: two ranks on gloo, each batch divided 16 + 16. Paraflow takes turns, in the same pair of processes, with
a hand-written loop on DistributedDataParallel(gradient_as_bucket_view=True) that divides the same way.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from contenders import CONTENDERS, Contender, measure
from rich.console import Console
from rich.table import Table
from two_processes import measure_two_processes
from workload import Size

IMPORT_BAR = 1.15
TWO_PROCESSES_BAR = 1.03
IMPORTS = {
    "torch": "import torch",
    "paraflow": "import paraflow; paraflow.Trainer",
    "accelerate": "import accelerate",
    "lightning": "import lightning",
    "transformers": "from transformers import Trainer",
    "keras": "import os; os.environ['KERAS_BACKEND'] = 'torch'; import keras",
    "skorch": "import skorch",
    "ignite": "import ignite.engine",
}


@dataclass(frozen=True)
class Row:
    """A line of the table: medians.

    Attributes:
        title: What was measured.
        cost: Microseconds a step, or milliseconds an import.
        ratio: To the reference, the median over turns.
        spread: The first and the third quartile of those ratios.
        bar: The most that the ratio may be, or None.
    """

    title: str
    cost: float
    ratio: float
    spread: tuple[float, float]
    bar: float | None = None

    @property
    def met(self) -> bool:
        """Whether the bar is met; where there is none, it is."""
        return self.bar is None or self.ratio <= self.bar


def make_row(title: str, pairs: list[tuple[float, float]], bar: float | None = None) -> Row:
    """Makes the line of pairs (reference, contender)."""
    ratios = [theirs / reference for reference, theirs in pairs]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return Row(title, statistics.median(theirs for _, theirs in pairs), statistics.median(ratios), (low, high), bar)


def installed(package: str, console: Console) -> bool:
    """Whether a package is here; says so where it is not."""
    if importlib.util.find_spec(package) is not None:
        return True
    console.print(f"{package} is not installed, so it is left out")
    return False


def in_process(contender: Contender, size: Size) -> list[tuple[float, float]]:
    """Measures a contender in a process of its own."""
    command = [sys.executable, __file__, "--worker", contender.name]
    command += ["--steps", str(size.steps), "--epochs", str(size.epochs)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{contender.title} failed:\n{done.stderr}")
    return [(ours, theirs) for ours, theirs in json.loads(done.stdout.splitlines()[-1])]


def measure_steps(contenders: list[Contender], size: Size, rounds: int, console: Console) -> list[Row]:
    """Measures contenders, round robin."""
    pairs: dict[str, list[tuple[float, float]]] = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        # Every other round goes backwards, so that nobody always follows the same neighbour.
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            with console.status(f"round {number + 1} of {rounds}: {contender.title}"):
                pairs[contender.name] += in_process(contender, size)
    own = [
        (ours, ours) for contender in contenders if not contender.fused_reference for ours, _ in pairs[contender.name]
    ]
    reference = [make_row("hand-written loop", own)] if own else []
    return [*reference, *(make_row(c.title, pairs[c.name], c.bar) for c in contenders)]


def measure_pairs_of_processes(size: Size, rounds: int, console: Console) -> list[Row]:
    """Measures two ranks."""
    against_itself: list[tuple[float, float]] = []
    paraflow: list[tuple[float, float]] = []
    with console.status("two processes"):
        for _ in range(rounds):
            against_itself += measure_two_processes(size, itself=True)
            paraflow += measure_two_processes(size)
    return [
        make_row("hand-written DDP loop", [(ours, ours) for ours, _ in paraflow]),
        make_row("hand-written DDP loop, against itself", against_itself),
        make_row("Paraflow", paraflow, TWO_PROCESSES_BAR),
    ]


def measure_imports(rounds: int, console: Console) -> list[Row]:
    """Measures imports, each in fresh interpreters, in turn."""
    names = [name for name in IMPORTS if installed(name, console)]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in names:
            with console.status(f"round {number} of {rounds}: import {name}"):
                took = _import_seconds(IMPORTS[name])
            if number:  # in the first round files come from the disk
                seconds[name].append(took * 1e3)
    return [
        make_row(IMPORTS[name], list(zip(seconds["torch"], seconds[name], strict=True)), bar)
        for name in names
        for bar in [IMPORT_BAR if name == "paraflow" else None]
    ]


def _import_seconds(statement: str) -> float:
    code = f"import time; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
    # With bytecode, as an installed package has it; the first of the runs, which is not counted, may write it.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout.splitlines()[-1])


def print_table(title: str, unit: str, rows: list[Row], console: Console) -> None:
    """Prints lines as a table."""
    table = Table("", unit, "ratio", "quartiles", "bar", "", title=title, title_justify="left")
    for column in table.columns[1:5]:
        column.justify = "right"
    for row in rows:
        bar = "" if row.bar is None else f"≤ {row.bar:.2f}"
        met = "" if row.bar is None else "[green]met[/]" if row.met else "[red]not met[/]"
        low, high = row.spread
        table.add_row(row.title, f"{row.cost:.0f}", f"{row.ratio:.3f}", f"{low:.3f}–{high:.3f}", bar, met)
    console.print(table)


def machine() -> str:
    """One line about the machine and the versions."""
    import torch

    cpu = Path("/proc/cpuinfo")
    facts = cpu.read_text().splitlines() if cpu.is_file() else []
    models = [line.split(":", 1)[1].strip() for line in facts if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    model = models[0] if models else platform.processor() or platform.machine()
    return f"Python {platform.python_version()}, torch {torch.__version__}, {model}, {cores} cores, {platform.system()}"


def parse() -> Any:
    """Reads the command line."""
    names = [contender.name for contender in CONTENDERS]
    parser = argparse.ArgumentParser(description="What Paraflow costs, beside a hand-written loop and peers.")
    parser.add_argument("--quick", action="store_true", help="three minutes, with less certain numbers")
    parser.add_argument("--steps", type=int, help="steps of an epoch, the length of a turn")
    parser.add_argument("--epochs", type=int, help="turns in one process")
    parser.add_argument("--rounds", type=int, help="processes of each contender")
    parser.add_argument("--only", nargs="+", choices=[*names, "import", "two"], metavar="NAME", help=", ".join(names))
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is not met")
    parser.add_argument("--worker", choices=names, help=argparse.SUPPRESS)
    given = parser.parse_args()
    steps, epochs, rounds = (256, 5, 1) if given.quick else (256, 15, 3)
    given.size = Size(given.steps or steps, given.epochs or epochs)
    given.rounds = given.rounds or rounds
    return given


def main() -> int:
    """Measures what was asked for, and returns the exit code."""
    given = parse()
    if given.worker:
        print(json.dumps(measure(given.worker, given.size)))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(machine(), highlight=False)
    wanted = [contender for contender in CONTENDERS if given.only is None or contender.name in given.only]
    packages = {package: installed(package, console) for package in dict.fromkeys(c.package for c in wanted)}
    contenders = [contender for contender in wanted if packages[contender.package]]
    rows: list[Row] = []
    if contenders:
        steps = measure_steps(contenders, given.size, given.rounds, console)
        print_table("One training step, one process", "µs", steps, console)
        rows += steps
    if given.only is None or "import" in given.only:
        imports = measure_imports(given.rounds, console)
        print_table("Import", "ms", imports, console)
        rows += imports
    if given.only is None or "two" in given.only:
        two = measure_pairs_of_processes(given.size, given.rounds, console)
        print_table("One training step, two processes", "µs", two, console)
        rows += two
    return 1 if given.check and not all(row.met for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
