"""Does to a training what can happen to one, and says how much of it survived, and how long it took.

    python benchmarks/faults.py              # everything, 20 kills of each kind: more than half an hour
    python benchmarks/faults.py --quick      # everything, 3 kills of each kind
    python benchmarks/faults.py --only twice full-disk

The training (fault_runs.py) is small, and has all that a resumed run can get wrong: dropout, batch statistics,
augmentation with three random generators in a loader's workers, a short last batch, AdamW, a cosine schedule with
warm-up, a metric, validation, an average of the weights (EMA), and a checkpoint every three or four steps that keeps
the best by validation loss. Each run is a process, or two under `paraflow launch`, that a shell could have started.

"Bit-equal" is a run whose weights, optimizer, schedule, counters, position in the data, sums of the epoch, history and
average are, byte for byte, those of a run that nobody touched.

one, two    kill -9 at a moment drawn evenly from a run's time after start-up, of one process; of a rank of two, or
            (one time in three) of their launcher, whose ranks then have to end. It is started again with
            resume="auto" until it is done. Every other run has checkpoints of 17 MB, whose writing takes most of the
            time; of either kind half are written in the loop, half in the background. "Hung" is a run, or a rank
            without its launcher, that had to be ended. A checkpoint is "lost" where it was complete, and the run went
            on from an older one or from farther back than one interval (in the background two). "Unpickled" are the
            audit events `pickle.find_class` in any of the processes, but for what the loader's workers send.
twice       the same with two kills, the second of which may come while the run is being resumed.
restarts    a rank is killed under `paraflow launch --max-restarts 2`, which carries on by itself.
exceptions  seconds until all ranks have ended, and how many lines come after the failed rank's traceback.
stalls      rank 1 sleeps in a callback, or is stopped by SIGSTOP; stall_timeout is 4 seconds.
signals     SIGTERM and SIGINT at a random step, to one process, to a rank, to the launcher.
full-disk   a tmpfs on which one checkpoint fits and half of another (needs root).
bits        one bit flipped at random, 10 × `--times` times in each file; then runs that resume from altered files.
hostile     checkpoints that hold pickles, or names to import, with checksums that match.
values      small numbers that are known by hand.

Two runs go at the same time, but for those whose seconds count.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from fault_disks import flipped_bits, full_disk, hostile
from fault_ends import exceptions, signals, stalls
from fault_jobs import Bench, Row
from fault_kills import killed_once, killed_twice, restarted
from fault_values import values
from overhead import machine
from rich.console import Console
from rich.table import Table

TESTS: dict[str, Callable[[Bench], list[Row]]] = {
    "one": lambda bench: [killed_once(bench, 1)],
    "two": lambda bench: [killed_once(bench, 2)],
    "twice": lambda bench: [killed_twice(bench)],
    "restarts": lambda bench: [restarted(bench)],
    "exceptions": exceptions,
    "stalls": stalls,
    "signals": signals,
    "full-disk": full_disk,
    "bits": flipped_bits,
    "hostile": hostile,
    "values": lambda bench: values(),
}


def print_rows(rows: list[Row], console: Console) -> None:
    """Prints the table."""
    table = Table("test", "result", "seconds", "", title="Faults", title_justify="left")
    for row in rows:
        marks = {True: "[green]right[/]", False: "[red]wrong[/]", None: ""}
        table.add_row(row.test, row.result, row.seconds, marks[row.right])
    console.print(table)


def parse() -> Any:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="What survives of a training when things go wrong.")
    parser.add_argument("--only", nargs="+", choices=TESTS, metavar="NAME", help=", ".join(TESTS))
    parser.add_argument("--times", type=int, default=20, help="kills of each kind")
    parser.add_argument("--quick", action="store_true", help="3 kills of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--folder", type=Path, help="where runs are made; by default in the temporary folder")
    return parser.parse_args()


def main() -> int:
    """Does what was asked for; the exit code is 1 where anything is not right."""
    # A shell's job in the background ignores SIGINT, and so would what it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    given, began = parse(), time.monotonic()
    console = Console(width=None if sys.stdout.isatty() else 150)

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - began:6.0f} s  {text}", highlight=False, markup=False, soft_wrap=True)

    folder = Path(tempfile.mkdtemp(prefix="paraflow-faults-", dir=given.folder))
    bench, rows = Bench(folder, 3 if given.quick else given.times, given.seed, say), []
    console.print(machine(), highlight=False)
    for name in given.only or TESTS:
        try:
            rows += TESTS[name](bench)
        except Exception as error:  # the others are still to be done
            console.print_exception()
            bench.wrong(name, f"{type(error).__name__}: {error}")
            rows.append(Row(name, f"{type(error).__name__}: {error}", right=False))
        say(f"{name} is done")
    print_rows(rows, console)
    say(f"{sum(row.right is False for row in rows)} of {len(rows)} rows are wrong")
    if bench.failures or any(row.right is False for row in rows):
        console.print(f"The folders of what went wrong are in {folder}", highlight=False, soft_wrap=True)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
