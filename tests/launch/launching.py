"""A launcher in a process of its own, whose ranks run a script that is written for the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]

# What a rank of a Trainer does: a signal to any rank stops all of them, and each saves before it ends.
STOPPING = """
import os, pathlib, signal, sys, time
folder, rank = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])

def ask(number, frame):
    (folder / f"asked{rank}").write_text(str(number))
    (folder / f"asked{rank}").replace(folder / "stop")

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, ask)
(folder / f"part{rank}").write_text(str(os.getpid()))
(folder / f"part{rank}").replace(folder / f"pid{rank}")
with open(folder / "starts", "a") as file:
    file.write(f"{rank}")
while not (folder / "stop").exists():
    time.sleep(0.02)
number = int((folder / "stop").read_text())
"""
LEAVE = """
(folder / f"saved{rank}").touch()
if number == signal.SIGINT:
    raise KeyboardInterrupt
sys.exit(128 + number)
"""


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


class Launched:
    """`paraflow launch` of a script with the folder as its argument; the script writes pid0, pid1, ... there."""

    def __init__(
        self, folder: Path, text: str, *options: str, processes: int = 2, before: tuple[str, ...] = ()
    ) -> None:
        self.folder = folder
        script = folder / "train.py"
        script.write_text(text)
        environment = {name: value for name, value in os.environ.items() if name != "PARAFLOW_TRACEBACK"}
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", "paraflow.cli", "launch", "-n", str(processes), *options]
            + [str(script), str(folder)],
            env={**environment, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def pids(self, number: int = 2) -> list[int]:
        wait_until(lambda: len(list(self.folder.glob("pid*"))) == number)
        return [int((self.folder / f"pid{rank}").read_text()) for rank in range(number)]

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, seconds: float = 30) -> tuple[int, str]:
        """The exit status and what stood on stderr."""
        try:
            _, error = self.process.communicate(timeout=seconds)
        finally:
            self.process.kill()
        return self.process.returncode, error

    def saved(self) -> set[str]:
        return {path.name for path in self.folder.glob("saved*")}
