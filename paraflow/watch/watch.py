"""The watch of one rank: a thread that hears signals and the other ranks while the main thread trains or waits.

- A signal is told to all, and every rank stops at the same step boundary (boundary.py).
- A rank that raises tells all, and ranks that still wait in a collective seconds later end.
- Where there is no sign of life, every rank says where it is, and who is waited for is named (stall.py, verdict.py).
- An attempt at a step that one rank gives up is given up by all.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from signal import Signals as SignalName
from types import TracebackType
from typing import Any, ClassVar

import torch

from paraflow.errors import StallError
from paraflow.mesh import Mesh
from paraflow.watch.board import Board
from paraflow.watch.boundary import Boundary
from paraflow.watch.ending import end_run
from paraflow.watch.position import Position, position, stack_of
from paraflow.watch.signals import Signals
from paraflow.watch.stall import Lookout

_LOOK_SECONDS = 0.2
_TORCH_SECONDS = 1800.0  # what gloo waits by itself
_FOR_EVER = 365 * 86400.0
_GIVE_UP_SECONDS = 60.0  # for ranks to hear of it
_FAILED_SECONDS = 3.0  # for a rank to raise by itself after another has


class Watch:
    """Watches over one run; a context manager that all ranks enter together.

    Args:
        mesh: The ranks.
        life: Returns a number that changes while the main thread gets on.
        stall_seconds: After so long without a sign of life, a run in which ranks wait for another is ended; after a
            tenth of it, it is said who is waited for. None never ends it.
        signals: The numbers of the signals that ask the run to stop.
    """

    _current: ClassVar[Watch | None] = None

    def __init__(
        self, mesh: Mesh, life: Callable[[], int], stall_seconds: float | None, signals: Sequence[int] = ()
    ) -> None:
        self._mesh = mesh
        self._life = life
        self._limit = math.inf if stall_seconds is None else stall_seconds
        self._signals = Signals(signals)
        self._boundary = Boundary()
        self._main = threading.get_ident()
        self._leaving = threading.Event()
        self._stop_signal: int | None = None
        self._failed: tuple[float, dict[str, Any]] | None = None
        self._given_up = -1
        self._told: set[str] = set()
        # A thousand ranks that look five times a second would keep the store busy.
        self._look_seconds = max(_LOOK_SECONDS, mesh.world_size / 500)

    @classmethod
    def current(cls) -> Watch | None:
        """Returns the watch that is in place in this process, or None."""
        return cls._current

    @classmethod
    def asked_to_stop(cls, mesh: Mesh) -> bool:
        """Whether a signal has asked the present run to stop, on any rank; for what lasts long between two steps."""
        return mesh.any(cls._current is not None and cls._current._stop_signal is not None)

    def start(self, step: int) -> None:
        """Begins at a step."""
        self._boundary.start(step)

    def __enter__(self) -> Watch:
        """Begins to watch: a collective. From here the watch, and no timeout of torch's before it, ends a stall."""
        self._mesh.wait_at_most(max(min(2 * self._limit, _FOR_EVER), _TORCH_SECONDS))
        self._board = Board(self._mesh)
        alive = lambda: self._life() + self._boundary.passed  # noqa: E731
        self._lookout = Lookout(self._board, alive, self._where, self._limit, _say)
        self._signals.install()
        self._before, Watch._current = Watch._current, self
        self._thread = threading.Thread(target=self._run, name="paraflow-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Tells the others how this rank leaves, and ends the watch."""
        Watch._current = self._before
        self._leaving.set()
        self._signals.wake()
        self._thread.join()
        # A notebook's kernel lives on, and needs its own handlers; a rank that was asked to stop is about to end.
        self._signals.remove(stopping=self._stop_signal is not None and self._mesh.world_size > 1)
        with contextlib.suppress(Exception):  # the store's host is gone: nobody can be told
            self._board.answer("left", "it is done" if error is None else f"{type(error).__name__}: {error}")
            if error is not None and self._stop_signal is None:
                self._board.post("failed", traceback="".join(traceback.format_exception(error)))

    def stopped(self, step: int) -> int | None:
        """Returns the signal that ends the run at this step boundary, the same on every rank, or None."""
        return None if self._boundary.passes(step) else self._stop_signal

    def stopped_after_the_last(self) -> int | None:
        """Returns the signal that has come since the last boundary, on whatever rank, or None: a collective."""
        self._signals.wait(0)
        heard = self._signals.first or self._stop_signal or 0
        return max(int(number) for number in self._mesh.all_gather(torch.tensor([heard]))) or None

    def give_up(self, attempt: int) -> None:
        """Tells all ranks to give up an attempt at a step, and returns when they know.

        A rank that waits in this step's collectives cannot come to its end before this rank joins them, so it knows in
        time.

        Raises:
            StallError: A rank does not answer.
        """
        self._board.post("given_up", attempt=attempt)
        heard = self._board.answers(f"given-up-{attempt}", _GIVE_UP_SECONDS)
        silent = [rank for rank in range(self._mesh.world_size) if rank not in heard]
        if silent:
            raise StallError(f"A step was to be begun anew, and rank {silent[0]} has not answered in a minute.")

    def given_up(self, attempt: int) -> bool:
        """Whether some rank gave up an attempt at a step."""
        return self._given_up == attempt

    def _run(self) -> None:
        while not self._leaving.is_set():
            number = self._signals.wait(self._look_seconds)
            for look in (lambda number=number: self._look_at_board(number), self._lookout.look, self._end_if_failed):
                try:
                    look()
                except Exception as error:  # this thread must not end: nobody else hears signals
                    self._has_trouble(error)

    def _look_at_board(self, number: int | None) -> None:
        if number is not None:
            self._board.post("stop", signal=number)
        for event in self._board.new_events():
            self._handle(event)
        self._decide_where_to_stop()

    def _handle(self, event: dict[str, Any]) -> None:
        kind = event["kind"]
        if kind == "where":
            self._lookout.on_where(event)
        elif kind == "end":
            self._lookout.on_end(event)
        elif kind == "failed" and event["rank"] != self._mesh.rank:
            self._failed = self._failed or (time.monotonic(), event)
        elif kind == "given_up":
            self._given_up = int(event["attempt"])
            self._board.answer(f"given-up-{self._given_up}", True)
        elif kind == "stop" and self._stop_signal is None:
            self._stop_signal = int(event["signal"])
            self._signals.arm(self._stop_signal)
            self._board.answer("boundary", self._boundary.hold())

    def _has_trouble(self, error: Exception) -> None:
        """Says once that the other ranks cannot be reached; who waits for them for too long ends by itself."""
        if "trouble" not in self._told:
            self._told.add("trouble")
            _say(f"rank {self._mesh.rank} cannot reach the other ranks' watch: {type(error).__name__}: {error}")
        if self._lookout.seconds > self._limit and self._position(self._lookout.seconds).collective:
            here = self._position(self._lookout.seconds)
            end_run(f"The other ranks cannot be asked where they are; rank 0's host may be gone. {here}")

    def _decide_where_to_stop(self) -> None:
        """Decides once every rank has said at which boundary it can stop, or has left the run: all decide alike."""
        if self._stop_signal is None or "stop" in self._told:
            return
        left = self._board.answers("left", 0)  # a rank leaves after its watch has given its last answer
        answers = self._board.answers("boundary", 0)
        if len(answers.keys() | left.keys()) < self._mesh.world_size:
            return
        self._told.add("stop")
        self._boundary.decide(max(answers.values()))
        if self._mesh.rank == 0:
            name = SignalName(self._stop_signal).name
            step = max(answers.values())
            _say(f"{name}: the run stops after step {step}, if it has not ended by then. Once more ends it at once.")

    def _end_if_failed(self) -> None:
        if self._failed is None or time.monotonic() - self._failed[0] < _FAILED_SECONDS:
            return
        here = self._position(self._lookout.seconds)
        if here.collective is None:
            return  # it waits for nobody yet
        rank, said = self._failed[1]["rank"], self._failed[1]["traceback"]
        end_run(f"rank {rank} failed, and this rank waits for it no longer ({here}). Rank {rank} said:\n{said}")

    def _where(self, seconds: float) -> tuple[Position, str]:
        return self._position(seconds), stack_of(self._main)

    def _position(self, seconds: float) -> Position:
        return position(self._mesh.rank, self._boundary.passed, seconds, self._main, held=self._boundary.waiting)


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads stderr any more
        print(text, file=sys.stderr, flush=True)
