"""What a thread waits for that torch does not record: messages from one rank to another."""

from __future__ import annotations

import threading
from types import TracebackType

_waits: dict[int, str] = {}


class waits_for:
    """While it is active, this thread waits for something.

    Args:
        what: It in words that follow "waits in": ``"a message from rank 1"``.

    Example:
        >>> with waits_for("a message from rank 1"):
        ...     waited_for(threading.get_ident())
        'a message from rank 1'
        >>> waited_for(threading.get_ident()) is None
        True
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        _waits[threading.get_ident()] = self._what

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _waits.pop(threading.get_ident(), None)


def waited_for(thread: int) -> str | None:
    """Returns what a thread waits for, or None."""
    return _waits.get(thread)
