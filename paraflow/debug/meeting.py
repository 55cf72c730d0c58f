"""Where ranks say what they are about to run, and wait until all of their group have said the same.

In the store, a rank has one key with what it said last, and a set of ranks that meet has one with the verdict on their
last meeting: both are written over, so the store does not grow. The lowest rank of a group judges; another does where
that one has left or is silent. A verdict is written by compare-and-set: there is one, and every rank reads it, late
ones too.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from paraflow.debug.said import Said
from paraflow.debug.sentences import come_apart, of_two_lines
from paraflow.errors import ParaflowError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # exported, but not in torch's __all__

_GRACE_SECONDS = (
    1.0  # for ranks that are a little late to be named too, and for the error of one that left to come first
)
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0001, 0.005


class Meeting:
    """A rank's part in all meetings of one check.

    Args:
        store: A key-value store of all ranks, over a connection of its own.
        rank: This rank.
        patience: For how many seconds a rank that says nothing is waited for.
    """

    def __init__(self, store: Store, rank: int, patience: float) -> None:
        self._store = store
        self._patience = patience
        self._places: dict[str, int] = {}
        self._known: set[str] = set()
        self._warned: set[str] = set()
        self._last = Said(rank, session=store.add(f"entered/{rank}", 1))
        self._say(self._last)

    def meet(self, ranks: Sequence[int], said: Said) -> None:
        """Waits until every rank has said the same.

        Args:
            ranks: The ranks that meet, in order; this one is among them.
            said: What this rank is about to run; session, stream and place are filled in here.

        Raises:
            ParaflowError: Not all say the same, or one has left or says nothing: the same sentence on every rank.
        """
        stream = ",".join(map(str, ranks))
        place = self._places.get(stream, 0)
        self._places[stream] = place + 1
        said = replace(said, session=self._last.session, state="at", stream=stream, place=place)
        try:
            self._say(said)
            sentence = self._verdict(ranks, said)
        except RuntimeError as error:
            raise ParaflowError(
                f"Step {said.step}: rank {said.rank} is at {said.what}, {said.site}, and the key-value store of the "
                f"ranks does not answer: the process that serves it has ended. ({error})"
            ) from error
        if sentence:
            raise ParaflowError(sentence)

    def leave(self, error: BaseException | None = None) -> None:
        """Tells the others that this rank comes to no further meeting, and why."""
        reason = "" if error is None else f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
        self._say(replace(self._last, state="left", reason=reason))

    def _say(self, said: Said) -> None:
        self._store.set(f"said/{said.rank}", said.dump())
        self._last = said

    def _verdict(self, ranks: Sequence[int], mine: Said) -> str:
        """Returns the sentence that all raise, or an empty one."""
        key, mark = f"verdict/{mine.stream}", f"{mine.session}/{mine.place}/"
        judge = f"said/{ranks[0]}"
        begun, pause, apart_since = time.monotonic(), _SHORTEST_PAUSE, 0.0
        self._ensure(key, judge)
        while True:
            written, by_judge = self._store.multi_get([key, judge])
            verdict = written.decode()
            if not verdict.startswith(mark):
                waited = time.monotonic() - begun
                first = Said.load(by_judge, ranks[0])
                if mine.rank == ranks[0] or waited > self._patience or _has_left(first, mine):
                    all_said = self._read(ranks)
                    apart_since = apart_since or (waited if _apart(all_said, mine) else 0.0)
                    grace_over = bool(apart_since) and waited - apart_since > _GRACE_SECONDS
                    sentence = self._judge(all_said, mine, waited, late=grace_over or waited > self._patience)
                    if sentence is not None:
                        verdict = self._store.compare_set(key, written.decode(), mark + sentence).decode()
            if verdict.startswith(mark):
                return verdict.removeprefix(mark)
            time.sleep(pause)
            pause = min(pause * 1.3, _LONGEST_PAUSE)

    def _judge(self, all_said: Sequence[Said], mine: Said, waited: float, *, late: bool) -> str | None:
        """Returns the sentence, an empty one where all say the same, or None where some are still waited for."""
        here = [said for said in all_said if _is_here(said, mine)]
        away = [said for said in all_said if not _is_here(said, mine)]
        if away and not late:
            return None
        if away or len({(said.key, said.step) for said in here}) > 1:
            gone = {said.rank for said in away if _has_left(said, mine)}
            return come_apart(here, away, gone, waited)
        if mine.symmetric and len({said.site for said in here}) > 1:
            self._warn(of_two_lines(here), " ".join(said.site for said in here))
        return ""

    def _warn(self, sentence: str, places: str) -> None:
        if places not in self._warned:
            self._warned.add(places)
            warnings.warn(sentence, stacklevel=2)

    def _read(self, ranks: Sequence[int]) -> list[Said]:
        keys = [f"said/{rank}" for rank in ranks]
        self._ensure(*keys)
        return [Said.load(text, rank) for rank, text in zip(ranks, self._store.multi_get(keys), strict=True)]

    def _ensure(self, *keys: str) -> None:
        """Makes sure that reading these keys never blocks."""
        for key in keys:
            if key not in self._known:
                self._store.compare_set(key, "", "-")
                self._known.add(key)


def _is_here(said: Said, mine: Said) -> bool:
    return said.state == "at" and (said.session, said.stream, said.place) == (mine.session, mine.stream, mine.place)


def _has_left(said: Said, mine: Said) -> bool:
    return said.session > mine.session or (said.session == mine.session and said.state == "left")


def _apart(all_said: Sequence[Said], mine: Said) -> bool:
    """Whether it is certain that the ranks will not agree, though some are not here yet."""
    here = {(said.key, said.step) for said in all_said if _is_here(said, mine)}
    return len(here) > 1 or any(_has_left(said, mine) for said in all_said)
