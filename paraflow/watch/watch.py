"""The watch of one rank: a thread that hears signals and the other ranks while the main thread trains or waits.

- A signal is told to all, and every rank stops at the same step boundary (boundary.py).
- A rank that raises tells all, and ranks that are still here seconds later end.
- Where there is no sign of life, every rank says where it is, and who is waited for is named (position.py, verdict.py).
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from signal import Signals as SignalName
from types import TracebackType
from typing import Any, ClassVar

from paraflow.errors import StallError
from paraflow.mesh import Mesh
from paraflow.watch.board import Board
from paraflow.watch.boundary import Boundary
from paraflow.watch.ending import end_run
from paraflow.watch.position import Position, position, stack_of
from paraflow.watch.signals import Signals
from paraflow.watch.verdict import judge

_LOOK_SECONDS = 0.2
_ANSWER_SECONDS = 5.0  # for ranks to say where they are, or at which step they can stop
_TORCH_SECONDS = 1800.0  # what gloo waits by itself
_FOR_EVER = 365 * 86400.0
_GIVE_UP_SECONDS = 60.0  # for ranks to hear of it
_FAILED_SECONDS = 3.0  # for a rank to raise by itself after another has


class Watch:
    """Watches over one run; a context manager that all ranks enter together.

    Args:
        mesh: The ranks.
        life: Returns a number that changes while the main thread gets on.
        stall_seconds: After so long without a sign of life, a run in which ranks wait for another is ended; a tenth of
            it earlier it is said who is waited for. None never ends it.
        signals: The numbers of the signals that ask the run to stop.
    """

    _current: ClassVar[Watch | None] = None

    def __init__(
        self, mesh: Mesh, life: Callable[[], int], stall_seconds: float | None, signals: Sequence[int] = ()
    ) -> None:
        self._mesh = mesh
        self._life = life
        self._stall_seconds = stall_seconds
        self._signals = Signals(signals)
        self._boundary = Boundary()
        self._main = threading.get_ident()
        self._leaving = threading.Event()
        self._stop_signal: int | None = None
        self._failed: tuple[float, dict[str, Any]] | None = None
        self._alive, self._alive_at = -1, time.monotonic()
        self._given_up = -1
        self._told: set[str] = set()
        self._answered: dict[str, float] = {}
        self._here: tuple[Position | None, str] = (None, "")
        # A thousand ranks that look five times a second would keep the store busy.
        self._look = max(_LOOK_SECONDS, mesh.world_size / 500)

    @classmethod
    def current(cls) -> Watch | None:
        """Returns the watch that is in place in this process, or None."""
        return cls._current

    def start(self, step: int) -> None:
        """Begins at a step."""
        self._boundary.start(step)

    def __enter__(self) -> Watch:
        """Begins to watch: a collective. From here the watch, and no timeout of torch's before it, ends a stall."""
        patience = _FOR_EVER if self._stall_seconds is None else 2 * self._stall_seconds
        self._mesh.wait_at_most(max(patience, _TORCH_SECONDS))
        self._board = Board(self._mesh)
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
        try:
            self._board.answer("left", "it is done" if error is None else f"{type(error).__name__}: {error}")
            if isinstance(error, Exception):
                self._board.post("failed", traceback="".join(traceback.format_exception(error)))
        except Exception:  # the store's host is gone: nobody can be told
            return

    def stopped(self, step: int) -> int | None:
        """Returns the signal that ends the run at this step boundary, the same on every rank, or None."""
        return None if self._boundary.passes(step) else self._stop_signal

    def give_up(self, attempt: int) -> None:
        """Tells all ranks to give up an attempt at a step, and returns when they know.

        A rank that waits in this step's collectives cannot come to its end before this rank joins them, so it knows in
        time.
        """
        self._board.post("given_up", attempt=attempt)
        while self._given_up < attempt:
            time.sleep(0.001)
        self._board.answers(f"given-up-{attempt}", _GIVE_UP_SECONDS)

    def given_up(self, attempt: int) -> bool:
        """Whether some rank gave up an attempt at a step."""
        return self._given_up == attempt

    def _on_given_up(self, event: dict[str, Any]) -> None:
        self._given_up = int(event["attempt"])
        self._board.answer(f"given-up-{event['attempt']}", True)

    def _run(self) -> None:
        while not self._leaving.is_set():
            number = self._signals.wait(self._look)
            try:
                self._look_at_board(number)
            except Exception as error:  # the store's host is gone; what follows from it is seen below
                self._board_is_gone(error)
            self._end_after_failure()
            self._look_for_life()

    def _look_at_board(self, number: int | None) -> None:
        if number is not None:
            self._board.post("stop", signal=number)
        for event in self._board.new_events():
            getattr(self, f"_on_{event['kind']}")(event)
        self._decide_where_to_stop()

    def _board_is_gone(self, error: Exception) -> None:
        if "board" in self._told:
            return
        self._told.add("board")
        self._print(f"rank {self._mesh.rank} cannot read the store of rank 0's host: {type(error).__name__}: {error}")

    def _on_stop(self, event: dict[str, Any]) -> None:
        if self._stop_signal is not None:
            return
        self._stop_signal = int(event["signal"])
        self._board.answer("boundary", self._boundary.hold())

    def _decide_where_to_stop(self) -> None:
        """Decides once every rank has said at which boundary it can stop, or has left the run: all decide alike."""
        if self._stop_signal is None or "stop" in self._told:
            return
        answers = self._board.answers("boundary", 0)
        left = self._board.answers("left", 0)  # a rank leaves when its watch has given its last answer
        if len(answers.keys() | left.keys()) < self._mesh.world_size:
            return
        answers = self._board.answers("boundary", 0)
        self._told.add("stop")
        self._boundary.decide(max(answers.values()))
        if self._mesh.rank == 0:
            name = SignalName(self._stop_signal).name
            self._print(f"{name}: the run stops after step {max(answers.values())}. Once more ends it at once.")

    def _on_failed(self, event: dict[str, Any]) -> None:
        if event["rank"] != self._mesh.rank and self._failed is None:
            self._failed = (time.monotonic(), event)

    def _end_after_failure(self) -> None:
        if self._failed is None or time.monotonic() - self._failed[0] < _FAILED_SECONDS:
            return
        rank, said = self._failed[1]["rank"], self._failed[1]["traceback"]
        here = str(self._position())
        end_run(f"rank {rank} failed, and this rank waits for it no longer ({here}). Rank {rank} said:\n{said}")

    def _look_for_life(self) -> None:
        alive, now = self._life() + self._boundary.passed, time.monotonic()
        if alive != self._alive:
            self._alive, self._alive_at = alive, now
            self._told -= {"notice", "end"}
        if self._stall_seconds is None:
            return
        for stage, seconds in (("notice", self._stall_seconds / 10), ("end", self._stall_seconds)):
            if now - self._alive_at > seconds and stage not in self._told:
                self._told.add(stage)
                self._ask_where(stage)

    def _ask_where(self, stage: str) -> None:
        try:
            self._board.post("where", stage=stage)
        except Exception as error:
            self._board_is_gone(error)
            if stage == "end" and self._position().collective:
                end_run(f"The other ranks cannot be asked where they are: rank 0's host is gone. {self._position()}")

    def _on_where(self, event: dict[str, Any]) -> None:
        """Says where this rank is; the rank that asked first collects, judges, and tells."""
        stage, now = event["stage"], time.monotonic()
        if now - self._answered.get(stage, -math.inf) < _ANSWER_SECONDS:
            return  # several ranks asked at the same time
        self._answered[stage] = now
        self._told.add(stage)
        question = f"where-{event['number']}"
        where = self._position()
        self._here = where, stack_of(self._main)
        self._board.answer(question, where.to_dict())
        if event["rank"] != self._mesh.rank:
            return
        answers = self._board.answers(question, _ANSWER_SECONDS)
        left = self._board.answers("left", 0)
        positions = [Position(**said) for rank, said in answers.items() if rank not in left]
        verdict = judge(positions, left, self._mesh.world_size)
        if event["stage"] == "end" and verdict.hopeless:
            self._board.post("end", text=verdict.text)
            return
        ends = f" The run ends after {self._stall_seconds:.0f} s." if verdict.hopeless else ""
        self._print(f"No sign of life for {time.monotonic() - self._alive_at:.0f} s. {verdict.text}{ends}")

    def _on_end(self, event: dict[str, Any]) -> None:
        where, stack = self._here
        self._print(f"{where}\n{stack}")
        error = StallError(
            f"There was no sign of life for {self._stall_seconds:.0f} s. {event['text']}\nWhere one step, validation "
            "or callback may take longer than that, write Trainer(stall_timeout='2h')."
        )
        end_run(str(error), error)

    def _position(self) -> Position:
        seconds = time.monotonic() - self._alive_at
        return position(self._mesh.rank, self._boundary.passed, seconds, self._main)

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
