"""What a rank says of itself to the others."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True)
class Said:
    """What a rank is about to run, or that it is not there.

    Attributes:
        rank: The rank.
        session: How many checks it has entered; 0 where it has said nothing yet.
        state: Whether it has entered a check, is at a place in its program, or has left.
        stream: The ranks with which it is in order, and
        place: how often it has met them before.
        what: What it runs, in words; empty where it has run nothing yet.
        key: What must be the same on every rank.
        site: The line of the program.
        step: The step of the training.
        announced: Whether `what` is a place in the program, and no collective.
        symmetric: Whether all ranks are likely to be at the same line.
        reason: Why it has left, where that was an error.
    """

    rank: int
    session: int = 0
    state: Literal["entered", "at", "left"] = "entered"
    stream: str = ""
    place: int = -1
    what: str = ""
    key: str = ""
    site: str = ""
    step: int = 0
    announced: bool = False
    symmetric: bool = False
    reason: str = ""

    def dump(self) -> str:
        """Returns the text that `load` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: bytes, rank: int) -> Said:
        """Returns what a rank has dumped, or that it has said nothing.

        Example:
            >>> said = Said(1, session=2, what="barrier()")
            >>> Said.load(said.dump().encode(), 1) == said, Said.load(b"-", 1).session
            (True, 0)
        """
        return cls(rank) if text == b"-" else cls(**json.loads(text))
