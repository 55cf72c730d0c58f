"""How a rank failed, as the launcher tells it: the first failure in full, the others that differ in a line each."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paraflow.launch.worker import FAILURE_FILE, exit_status, signal_name


@dataclass(frozen=True)
class Said:
    """What a rank wrote about its failure before it ended.

    Attributes:
        time: When it failed, in seconds since the epoch.
        exit_code: The exit status it was about to end with.
        traceback: What Python would have printed.
        message: The error's class and message; None where the rank only ended itself (`sys.exit(3)`, an interrupt).
        refused: Whether Paraflow raised the error on purpose, so that its message says all there is to know.
    """

    time: float
    exit_code: int
    traceback: str
    message: str | None
    refused: bool


def read_failure(error_file: str) -> Said | None:
    """What the rank with this error file said, or None where it said nothing."""
    path = Path(error_file).with_name(FAILURE_FILE)
    if not path.exists():
        return None
    said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return Said(**said)


@dataclass(frozen=True)
class Failure:
    """A rank that failed: when (seconds since the epoch), with which `Popen.returncode`, and what it said.

    `stop` is the signal at whose request it ended in order, which is no failure unless others did not.
    """

    time: float
    rank: int
    pid: int
    returncode: int
    said: Said | None = None
    stop: signal.Signals | None = None

    @property
    def message(self) -> str | None:
        """The class and message of the error it raised, if it raised one."""
        return None if self.said is None else self.said.message

    def report(self, others: Sequence[Failure] = ()) -> str:
        """The text that is printed last: a line for each other rank that says something else, then this rank's block.

        Example:
            >>> slow = Failure(2.0, 1, 11, 1, Said(2.0, 1, "...", "RuntimeError: connection closed by peer", False))
            >>> refused = Said(1.0, 1, "...", "PlanError: data=3 does not divide 4 ranks.", True)
            >>> print(Failure(1.0, 0, 10, 1, refused).report([slow]))
            rank 1: RuntimeError: connection closed by peer
            rank 0 refused: PlanError: data=3 does not divide 4 ranks.
        """
        differ = [other for other in others if other.rank != self.rank and other.message not in (None, self.message)]
        return "\n".join([*(other.line() for other in differ), self._block()])

    def line(self) -> str:
        """What the rank said, in one line."""
        return f"rank {self.rank}: {(self.message or 'it said nothing').splitlines()[0]}"

    def _block(self) -> str:
        if self.said is not None and self.said.refused:
            return f"rank {self.rank} refused: {self.said.message}"
        code = exit_status(self.returncode)
        head = f"rank {self.rank} ({socket.gethostname()}, pid {self.pid}) failed with exit code {code}:"
        if self.said is not None:
            return f"{head}\n{self.said.traceback.rstrip()}"
        name = signal_name(self.returncode)
        if name is None:
            return f"{head}\nit ended its process itself, without an exception."
        hint = " The kernel does so when memory runs out." if name == "SIGKILL" else ""
        return f"{head}\nit was killed by {name}.{hint}"
