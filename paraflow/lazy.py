"""Names of a room that are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(room: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a room's ``__getattr__`` (PEP 562).

    Args:
        room: The package, such as ``"paraflow.callbacks"``.
        homes: The module in it that each name is in.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{room}.{homes[name]}"), name)
        setattr(sys.modules[room], name, value)  # the next use finds it at once
        return value

    return find
