"""The processes of the ranks on this node, as their launcher watches, signals and ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from paraflow.launch.failure import Said, read_failure
from paraflow.launch.worker import exit_status

FAILURE_SECONDS = 3.0  # what is left to the others, once a rank has failed
LOOK_SECONDS = 0.05

STOPS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def stop_signal(said: Said | None) -> signal.Signals | None:
    """The signal at whose request a rank ended in order: it raised KeyboardInterrupt or SystemExit(128 + number).

    Example:
        >>> stop_signal(Said(0.0, 143, "SystemExit: 143", None, False)).name
        'SIGTERM'
        >>> stop_signal(Said(0.0, 1, "...", "ValueError: x", False)) is None
        True
    """
    if said is None or said.message is not None:
        return None
    return next((number for number in STOPS if said.exit_code == 128 + number), None)


def listens(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal (where this cannot be seen, outside Linux, it is taken to)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return not Path("/proc/self/status").exists()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def send(process: subprocess.Popen[bytes], number: int) -> None:
    """Sends a signal to a process alone: the workers that it loads data with must live on while it saves."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a process with all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


class Processes:
    """The ranks' processes by local rank, and what they said when they ended."""

    def __init__(
        self,
        processes: Mapping[int, subprocess.Popen[bytes]] | None = None,
        error_files: Mapping[int, str] | None = None,
    ) -> None:
        self.processes = dict(processes or {})
        self.late: list[int] = []
        self._error_files = dict(error_files or {})
        self._passed: set[tuple[int, int]] = set()
        self._sent: dict[int, int] = {}  # the last signal that each was sent to end it, by local rank

    def alive(self) -> list[int]:
        """The local ranks that have not ended."""
        return [rank for rank, process in self.processes.items() if process.poll() is None]

    def said(self, local_rank: int) -> Said | None:
        """What a rank said about its end, or None."""
        return read_failure(self._error_files[local_rank])

    def stopped(self, local_rank: int) -> signal.Signals | None:
        """The signal at whose request a rank ends in order; None where it does not, or fell on its way."""
        said, returncode = self.said(local_rank), self.processes[local_rank].returncode
        number = stop_signal(said)
        if said is None or returncode is None or exit_status(returncode) == said.exit_code:
            return number
        return None

    def fell(self, local_rank: int) -> bool:
        """Whether a rank has ended in error, and neither in order nor by a signal that this launcher sent."""
        returncode = self.processes[local_rank].poll()
        if not returncode or returncode == -self._sent.get(local_rank, 0):
            return False
        return self.stopped(local_rank) is None

    def ended_for(self, local_rank: int) -> bool:
        """Whether this launcher's signal ended a rank."""
        returncode = self.processes[local_rank].poll()
        return bool(returncode) and returncode == -self._sent.get(local_rank, 0)

    def pass_on(self, number: int) -> None:
        """Sends a signal to each rank that has a handler for it and was not sent it before."""
        for rank in self.alive():
            process = self.processes[rank]
            if (process.pid, number) not in self._passed and listens(process.pid, number):
                self._passed.add((process.pid, number))
                send(process, number)

    def again(self, number: int) -> None:
        """Has `pass_on` send a signal once more."""
        self._passed = {(pid, passed) for pid, passed in self._passed if passed != number}

    def ask(self, number: int, ranks: list[int] | None = None) -> None:
        """Sends the signal to the ranks' own processes: to these, or to all that live."""
        for rank in self.alive() if ranks is None else ranks:
            self._sent[rank] = number
            send(self.processes[rank], number)

    def end(self, number: int, grace: float) -> None:
        """Asks all ranks to stop, waits, and kills what is left; cut short once one of them has failed."""
        self.ask(number)
        self.wait(grace)
        self.late += self.alive()
        self.kill()

    def wait(self, grace: float, each: Callable[[], None] | None = None) -> None:
        """Waits until every rank has ended, for so many seconds, but for few once one has failed."""
        end = time.monotonic() + grace
        failed = any(map(self.fell, self.processes))
        while self.alive() and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
            if each is not None:
                each()
            if not failed and any(map(self.fell, self.processes)):
                failed, end = True, min(end, time.monotonic() + FAILURE_SECONDS)

    def kill(self) -> None:
        """Kills every rank that is left, with all that it started."""
        for rank in self.alive():
            self._sent[rank] = signal.SIGKILL
            kill_group(self.processes[rank])
