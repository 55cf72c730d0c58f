"""Starts the runs of fault_runs.py, ends them, reads what they left, and compares it with untouched runs."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

SCRIPT = Path(__file__).with_name("fault_runs.py")
ROOT = Path(__file__).parents[1]
PATIENCE = 150.0
"""Seconds after which a run hangs; the longest takes a tenth of them where nothing else runs."""

SMALL: dict[str, Any] = {}
LARGE: dict[str, Any] = {"width": 1024, "epochs": 4, "every": 3}
"""Checkpoints of 17 MB, which take most of the time."""


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        test: What was done.
        result: What came of it.
        seconds: How long it took, in words; empty where that says nothing.
        right: Whether all of it is as promised; None where nothing is, or nothing was done.
    """

    test: str
    result: str
    seconds: str = ""
    right: bool | None = True


class Job:
    """A run that has been started.

    Args:
        folder: Where it leaves what it leaves.
        ranks: Its processes; one is started without a launcher.
        options: Those of fault_runs.py.
        launcher: ``"paraflow"`` or ``"torchrun"``.
        restarts: How many fresh starts the launcher has.
    """

    def __init__(
        self, folder: Path, ranks: int, options: dict[str, Any], launcher: str = "paraflow", restarts: int = 0
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.ranks, self._trace = folder, ranks, folder / "trace.jsonl"
        self._told = self._trace.stat().st_size if self._trace.exists() else 0
        command = [sys.executable, *_launch(ranks, launcher, restarts), str(SCRIPT), str(folder), json.dumps(options)]
        self.log = folder / f"log-{len(list(folder.glob('log-*')))}.txt"
        self.began = time.time()
        with self.log.open("wb") as log:
            # Not a pipe: a loader's worker that outlives its killed parent for a moment would hold it open.
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]),
                    "OMP_NUM_THREADS": "1",
                    "PYTHONUNBUFFERED": "1",
                },
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """What it has printed."""
        return self.log.read_text(errors="replace")

    def trace(self, what: str | None = None) -> list[dict[str, Any]]:
        """What it has noted, since it was started: everything, or all of one kind."""
        if not self._trace.exists():
            return []
        with self._trace.open() as file:
            file.seek(self._told)
            lines = [json.loads(line) for line in file.read().splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in lines if what is None or line["what"] == what]

    def pid(self, rank: int) -> int:
        """The process of a rank, started last."""
        return int(next(line["pid"] for line in reversed(self.trace("fit")) if line["rank"] == rank))

    def comes_to(self, what: str, count: int = 1, seconds: float = PATIENCE) -> bool:
        """Waits until it has noted something so often; whether it has."""
        end = time.monotonic() + seconds
        while len(self.trace(what)) < count:
            if self.process.poll() is not None or time.monotonic() > end:
                return len(self.trace(what)) >= count
            time.sleep(0.01)
        return True

    def wait(self, seconds: float = PATIENCE) -> int | None:
        """Waits for its end; returns its exit status as a shell has it, or None where it hangs, and is ended."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.end()
            return None
        return code if code >= 0 else 128 - code

    def orphans(self, seconds: float = 10.0) -> int:
        """How many ranks outlive their launcher for so long; they are ended."""
        pids = {line["pid"] for line in self.trace("fit")}
        end = time.monotonic() + seconds
        while (left := [pid for pid in pids if _lives(pid)]) and time.monotonic() < end:
            time.sleep(0.02)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(left)

    def end(self) -> None:
        """Ends it with all its ranks."""
        for pid in {self.process.pid, *(line["pid"] for line in self.trace("fit"))}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        self.process.wait()
        self.orphans(1.0)


def _launch(ranks: int, launcher: str, restarts: int) -> list[str]:
    if launcher == "torchrun":
        return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    if ranks == 1:
        return []
    return ["-m", "paraflow.cli", "launch", "-n", str(ranks), "--max-restarts", str(restarts)]


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@dataclass(frozen=True)
class Untouched:
    """A run that nobody disturbed.

    Attributes:
        state: All it ended with.
        seconds: From its first step to its end.
    """

    state: dict[str, Any]
    seconds: float


def result_of(folder: Path) -> dict[str, Any]:
    """The state a run ended with."""
    state: dict[str, Any] = torch.load(folder / "result.pt", weights_only=True)
    return state


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """The places at which two states are not equal, bit for bit."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        same = left.shape == right.shape and left.dtype == right.dtype
        return [] if same and left.numpy().tobytes() == right.numpy().tobytes() else [path]
    if isinstance(left, dict) and isinstance(right, dict):
        if list(left) != list(right):
            return [path]
        return [place for key in left for place in differences(left[key], right[key], f"{path}/{key}")]
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        if len(left) != len(right):
            return [path]
        pairs = enumerate(zip(left, right, strict=True))
        return [place for number, pair in pairs for place in differences(*pair, f"{path}/{number}")]
    return [] if type(left) is type(right) and repr(left) == repr(right) else [path]


@dataclass
class Bench:
    """Where runs are made, and what they are compared with.

    Attributes:
        folder: Each test has a folder in it; that of one that went wrong stays.
        times: How often what is left to chance is done.
        seed: Of chance.
        say: Prints a line.
        failures: What went wrong, in a line each.
    """

    folder: Path
    times: int
    seed: int
    say: Callable[[str], None]
    failures: list[str] = field(default_factory=list)
    _untouched: dict[str, Untouched] = field(default_factory=dict)
    _locks: dict[str, threading.Lock] = field(default_factory=dict)

    def chance(self, *names: object) -> random.Random:
        """Random numbers of a test's own, the same whatever else runs."""
        return random.Random(f"{self.seed}{names}")

    def untouched(self, ranks: int, options: dict[str, Any]) -> Untouched:
        """A run with these options that nobody disturbs; made once."""
        name = json.dumps([ranks, options], sort_keys=True)
        with self._locks.setdefault(name, threading.Lock()):
            if name in self._untouched:
                return self._untouched[name]
            folder = self.folder / f"untouched-{len(self._locks)}"
            job = Job(folder, ranks, options)
            code = job.wait()
            if code != 0:
                raise SystemExit(f"The run that nobody touched ended with {code}:\n{job.output}")
            (first, last) = job.trace("train")[0]["time"], job.trace("end")[-1]["time"]
            self._untouched[name] = Untouched(result_of(folder), last - first)
            return self._untouched[name]

    @contextlib.contextmanager
    def trial(self, name: str) -> Iterator[Path]:
        """A folder for a try; it goes where nothing went wrong in the meantime."""
        folder = self.folder / name
        folder.mkdir(parents=True)
        yield folder
        if not any(text.startswith(f"{name}:") for text in self.failures):
            shutil.rmtree(folder)

    def wrong(self, name: str, text: str, job: Job | None = None) -> None:
        """Notes that a try went wrong, and prints the end of its log."""
        tail = "" if job is None else "\n    " + "\n    ".join(job.output.splitlines()[-25:])
        self.failures.append(f"{name}: {text}")
        self.say(f"WRONG {name}: {text}{tail}")

    def compare(self, name: str, folder: Path, untouched: Untouched, job: Job | None = None) -> bool:
        """Whether a run ended, bit for bit, with the state of one that nobody touched."""
        if not (folder / "result.pt").exists():
            self.wrong(name, "it left no result", job)
            return False
        places = differences(result_of(folder), untouched.state)
        if places:
            self.wrong(name, f"{len(places)} values differ, such as {', '.join(places[:4])}", job)
        return not places

    def unpickled(self, name: str, folder: Path) -> int:
        """How many names a try has unpickled from a file."""
        file = folder / "unpickled.txt"
        names = file.read_text().splitlines() if file.exists() else []
        if names:
            self.wrong(name, f"{len(names)} names were unpickled, such as {', '.join(sorted(set(names))[:4])}")
        return len(names)


def two_at_a_time(tries: list[Callable[[], Any]]) -> list[Any]:
    """Runs tries, two at the same time."""
    with ThreadPoolExecutor(2) as pool:
        return [future.result() for future in [pool.submit(one) for one in tries]]


def between(seconds: list[float]) -> str:
    """A span of times in words."""
    return f"{min(seconds):.1f} – {max(seconds):.1f}" if seconds else ""
