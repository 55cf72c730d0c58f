"""Finds out that a run no longer gets on, and who is waited for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from paraflow.errors import StallError
from paraflow.watch.board import Board
from paraflow.watch.ending import end_run
from paraflow.watch.position import Position
from paraflow.watch.verdict import Verdict, judge

_ANSWER_SECONDS = 5.0  # for ranks to say where they are
_SUSPENDED_SECONDS = 5.0  # a longer gap between two looks: the whole process did not run


class Lookout:
    """One rank's part in finding out who is waited for.

    A rank that has had no sign of life for a tenth of the limit asks all ranks where they are, and again at the limit.
    The rank whose question comes first collects the answers and judges.

    Args:
        board: What the ranks read and write.
        life: Returns a number that changes while the main thread gets on.
        where: Returns where this rank is and its stack, given the seconds since its last sign of life.
        limit: After how many seconds the run ends, if ranks wait for another; infinity is never.
        say: Prints a text.
    """

    def __init__(
        self,
        board: Board,
        life: Callable[[], int],
        where: Callable[[float], tuple[Position, str]],
        limit: float,
        say: Callable[[str], None],
    ) -> None:
        self._board, self._life, self._where, self._limit, self._say = board, life, where, limit, say
        self._alive, self._alive_at = -1, time.monotonic()
        self._looked_at = time.monotonic()
        self._ask_at: dict[str, float] = {}
        self._answered: dict[str, float] = {}
        self._said_once: set[str] = set()
        self._here: tuple[Position, str] | None = None

    @property
    def seconds(self) -> float:
        """The time since this rank's last sign of life."""
        return time.monotonic() - self._alive_at

    def look(self) -> None:
        """Looks for a sign of life of this rank, and asks the others where they are if there is none for too long."""
        alive, now = self._life(), time.monotonic()
        gap, self._looked_at = now - self._looked_at, now
        if gap > _SUSPENDED_SECONDS:
            self._alive_at += gap
        if alive != self._alive:
            self._alive, self._alive_at = alive, now
            self._ask_at = {"notice": self._limit / 10, "end": self._limit}
        for stage, seconds in self._ask_at.items():
            if self.seconds > seconds:
                again = self.seconds + max(self._limit / 10, 2 * _ANSWER_SECONDS)
                self._ask_at[stage] = again if stage == "end" else math.inf
                self._board.post("where", stage=stage)

    def on_where(self, event: dict[str, Any]) -> None:
        """Says where this rank is; the one that asked collects, judges and tells."""
        stage, now = event["stage"], time.monotonic()
        if now - self._answered.get(stage, -math.inf) < _ANSWER_SECONDS:
            return  # several ranks asked at the same time
        self._answered[stage] = now
        question = f"where-{event['number']}"
        self._here = self._where(self.seconds)
        self._board.answer(question, self._here[0].to_dict())
        if event["rank"] != self._board.rank:
            return
        verdict = self._judge(question, stage)
        if self.seconds < self._seconds_of(stage):
            return  # it went on meanwhile
        if verdict.hopeless and stage == "end":
            self._board.post("end", text=verdict.text)
        else:
            self._tell(verdict, stage)

    def _judge(self, question: str, stage: str) -> Verdict:
        answers = self._board.answers(question, _ANSWER_SECONDS)
        left = self._board.answers("left", 0)
        positions = [Position(**said) for rank, said in answers.items() if rank not in left]
        return judge(positions, left, self._board.world_size, self._seconds_of(stage))

    def _seconds_of(self, stage: str) -> float:
        return self._limit if stage == "end" else self._limit / 10

    def _tell(self, verdict: Verdict, stage: str) -> None:
        if not verdict.hopeless and stage in self._said_once:
            return  # steps that take long; once is enough
        if not verdict.hopeless:
            self._said_once.add(stage)
        ends = f"\nIf nothing changes, the run ends after {self._limit:.0f} s." if verdict.hopeless else ""
        self._say(f"No sign of life for {self.seconds:.0f} s. {verdict.text}{ends}")

    def on_end(self, event: dict[str, Any]) -> None:
        """Says where this rank is, and ends it."""
        if self._here is not None:
            where, stack = self._here
            self._say(f"{where}\n{stack}")
        error = StallError(
            f"There was no sign of life for {self._limit:.0f} s. {event['text']}\nWhere one step, validation or "
            "callback may take longer than that, write Trainer(stall_timeout='2h')."
        )
        end_run(str(error), error)
