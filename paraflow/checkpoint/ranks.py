"""The ranks that write one checkpoint, and what they tell each other: beside the collectives, so in any thread.

    rank 0:      make the folder      say begun      write, hear all written      put in its place      say ended
    others:      hear begun           write          say written                  hear ended

Rank 0 says why where something went wrong, and then everyone knows it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from paraflow.errors import CheckpointError

PATIENCE = timedelta(minutes=30)
"""How long a rank waits for another that writes; where a process dies, its launcher ends the others long before."""


class Ranks:
    """The ranks that write one checkpoint.

    Args:
        identity: What tells the files of this save from those of another.
        rank: This rank.
        others: The others that write, rank 0 excepted.
        store: A key-value store that all of them see and nobody else uses; where there are others.
    """

    def __init__(
        self, identity: str | None = None, rank: int = 0, others: Sequence[int] = (), store: Any = None
    ) -> None:
        self.identity = identity or new_identity()
        self.rank = rank
        self._others = others
        self._store = store
        self._begun = False
        self._pending = list(others)

    def begin(self) -> None:
        """Rank 0 says that the folder is there."""
        self._begun = True
        self._announce("begun", "")

    def end(self) -> None:
        """Rank 0 says that the checkpoint is in its place."""
        self._announce("ended", "")

    def call_off(self, why: str) -> None:
        """Rank 0 says that there will be no checkpoint, and waits until nobody writes any more."""
        self._announce("ended" if self._begun else "begun", why)
        if self._begun:
            self._collect()

    def checksums(self) -> dict[int, str]:
        """Rank 0 waits for the others, and returns the checksum of what each has written.

        Raises:
            CheckpointError: One could not write.
        """
        said = self._collect()
        failures = [text.removeprefix("-") for text in said.values() if text.startswith("-")]
        if failures:
            raise CheckpointError(failures[0])
        return {rank: text.removeprefix("+") for rank, text in said.items()}

    def await_begin(self) -> None:
        """Another rank waits for the folder.

        Raises:
            CheckpointError: There will be no checkpoint.
        """
        self._require(self._hear("begun", self.rank))

    def written(self, checksum: str) -> None:
        """Another rank says that it has written, and waits for the end.

        Raises:
            CheckpointError: There will be no checkpoint.
        """
        self._say("written", self.rank, f"+{checksum}")
        self._require(self._hear("ended", self.rank))

    def failed(self, why: str) -> None:
        """Another rank says why it could not write, and waits for the end.

        Raises:
            CheckpointError: There will be no checkpoint.
        """
        self._say("written", self.rank, f"-{why}")
        self._require(self._hear("ended", self.rank))

    def withdraw(self, why: str) -> None:
        """Says that this rank cannot even begin; what the others say to it is passed over."""
        try:
            if self.rank == 0:
                self.call_off(why)
            else:
                self.await_begin()
                self.failed(why)
        except CheckpointError:
            return

    def _announce(self, what: str, text: str) -> None:
        for rank in self._others:
            self._say(what, rank, text)

    def _collect(self) -> dict[int, str]:
        said: dict[int, str] = {}
        while self._pending:
            rank = self._pending.pop(0)
            said[rank] = self._hear("written", rank)
        return said

    def _say(self, what: str, rank: int, text: str) -> None:
        self._store.set(f"{what}/{rank}", text or " ")

    def _hear(self, what: str, rank: int) -> str:
        key = f"{what}/{rank}"
        try:
            self._store.wait([key], PATIENCE)
            text: str = self._store.get(key).decode().strip()
            self._store.delete_key(key)
        except RuntimeError as error:
            whom = f"rank {rank}" if self.rank == 0 else "rank 0"
            raise CheckpointError(
                f"A checkpoint could not be written: nothing was heard of {whom} ({error})."
            ) from error
        return text

    def _require(self, told: str) -> None:
        if told:
            raise CheckpointError(told)


def new_identity() -> str:
    """Returns what no other save is called."""
    return secrets.token_hex(8)
