"""A board that all ranks read and write: events in one order, and answers by rank. It needs no collective."""

from __future__ import annotations

import json
import time
from typing import Any

from paraflow.mesh import Mesh

_LOOK_SECONDS = 0.02
_HOLE_SECONDS = 3.0  # after which an event that has a number and no text never comes


class Board:
    """What the watches of all ranks tell each other over the key-value store that the process group started from.

    Args:
        mesh: The ranks; all of them make the board together (a collective).
    """

    def __init__(self, mesh: Mesh) -> None:
        self.rank, self.world_size = mesh.rank, mesh.world_size
        self._seen = 0
        self._hole_since: float | None = None
        self._store = self._make_store(mesh)

    def _make_store(self, mesh: Mesh) -> Any:
        from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]  # not in its __all__

        if mesh.world_size == 1:
            return HashStore()
        store = mesh.store("watch")
        number = store.add("boards", 1) if mesh.rank == 0 else 0
        # Ranks may have made different numbers of boards before, so rank 0 names this one.
        return PrefixStore(f"board-{int(mesh.broadcast(number))}", store)

    def post(self, kind: str, **content: Any) -> None:
        """Adds an event for all ranks, this one included."""
        number = self._store.add("events", 1)
        self._store.set(f"event-{number}", json.dumps({**content, "kind": kind, "rank": self.rank, "number": number}))

    def new_events(self) -> list[dict[str, Any]]:
        """Returns the events since the last call, in the one order that all ranks see: ``kind``, ``rank``, and more."""
        events = []
        while True:
            if self._store.check([f"event-{self._seen + 1}"]):
                self._seen += 1
                events.append(json.loads(self._store.get(f"event-{self._seen}")))
            elif not self._is_hole():
                return events

    def _is_hole(self) -> bool:
        """Whether the next event will never come, for its rank was killed with its number taken; then it is passed."""
        if not self._store.check([f"event-{self._seen + 2}"]):
            self._hole_since = None
            return False
        now = time.monotonic()
        self._hole_since = self._hole_since or now
        if now - self._hole_since < _HOLE_SECONDS:
            return False
        self._seen, self._hole_since = self._seen + 1, None
        return True

    def answer(self, question: str, content: Any) -> None:
        """Gives this rank's answer to a question."""
        self._store.set(f"{question}-{self.rank}", json.dumps(content))

    def answers(self, question: str, seconds: float) -> dict[int, Any]:
        """Returns the answers by rank that are there within some seconds; it returns as soon as all are."""
        end, found = time.monotonic() + seconds, {}
        while True:
            for rank in range(self.world_size):
                if rank not in found and self._store.check([f"{question}-{rank}"]):
                    found[rank] = json.loads(self._store.get(f"{question}-{rank}"))
            if len(found) == self.world_size or time.monotonic() > end:
                return found
            time.sleep(_LOOK_SECONDS)
