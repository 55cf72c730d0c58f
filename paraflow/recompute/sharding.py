"""Tells apart what a sharded model communicates, to gather its parameters, and what the user's code does."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

_SHARDING = str(Path(torch.__file__).parent / "distributed" / "fsdp")
_BLOCKS = str(Path(__file__).parent)
_WATCHING = (__file__, str(Path(__file__).with_name("kept.py")))


def is_of_sharding() -> bool:
    """Whether the operator that runs now was called by torch's FSDP, from a part of the block that runs.

    A part gathers its parameters in its hooks, by collectives on groups that the user may use as well, so that only
    their caller tells. Gathering is what has to run again when the block does.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_SHARDING):
            return True
        if file.startswith(_BLOCKS) and file not in _WATCHING:
            return False
        frame = frame.f_back
    return False
