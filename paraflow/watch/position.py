"""Where a rank is: its step, its line of Python, and the collective it waits in."""

from __future__ import annotations

import json
import sys
import sysconfig
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from paraflow.waiting import waited_for

_PACKAGE = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), "<frozen")


@dataclass(frozen=True)
class Position:
    """Where a rank was when it was asked.

    Attributes:
        rank: The rank.
        step: Steps that were done.
        seconds: How long it had not moved.
        line: Its innermost line of the user's code, or else of Paraflow: ``"train.py:33 in training_step"``.
        collective: The collective that it waits in, or None.
        group: The group of that collective.
        sequence: Its number among those of the group.
    """

    rank: int
    step: int
    seconds: float
    line: str
    collective: str | None
    group: str = ""
    sequence: int = 0

    def __str__(self) -> str:
        place = f"waits in {self.collective}" if self.collective else "is in no collective"
        return f"rank {self.rank}: after step {self.step}, at {self.line}, {place}, for {self.seconds:.0f} s"

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data."""
        return asdict(self)


def position(rank: int, step: int, seconds: float, thread: int, *, held: bool = False) -> Position:
    """Returns where a thread of this rank is.

    Args:
        rank: The rank.
        step: Steps that are done.
        seconds: How long it has not moved.
        thread: The identifier of the thread.
        held: Whether it is held at a step boundary, until all ranks have said where they can stop.
    """
    line = line_of(thread)
    if held:
        return Position(rank, step, seconds, line, "the agreement on where to stop", "agreement")
    message = waited_for(thread)
    if message is not None:
        return Position(rank, step, seconds, line, message, f"messages to rank {rank}")
    entry = pending_collective()
    if entry is None:
        return Position(rank, step, seconds, line, None)
    return Position(rank, step, seconds, line, _words(entry), _group(entry), int(entry.get("collective_seq_id", 0)))


def line_of(thread: int) -> str:
    """Returns the innermost line of the user's code that a thread runs, or else of Paraflow, or else any."""
    frames = _frames(thread)
    users = [frame for frame in frames if not frame.f_code.co_filename.startswith((_PACKAGE, _TORCH, *_LIBRARIES))]
    ours = [frame for frame in frames if frame.f_code.co_filename.startswith(_PACKAGE)]
    if not frames:
        return "no line of Python"
    if not users:
        return _place((ours or frames)[0])
    within = ours and frames.index(ours[0]) < frames.index(users[0])
    return f"{_place(users[0])} (within it {_place(ours[0])})" if within else _place(users[0])


def _place(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    name = path.relative_to(Path(_PACKAGE).parent) if path.is_relative_to(_PACKAGE) else path.name
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"


def stack_of(thread: int) -> str:
    """Returns the Python stack of a thread, as a traceback shows it."""
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)).rstrip() if frame is not None else ""


def _frames(thread: int) -> list[FrameType]:
    """A thread's frames, innermost first."""
    frame, frames = sys._current_frames().get(thread), []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def pending_collective() -> dict[str, Any] | None:
    """Returns the oldest collective of this process that is not done, as torch's flight recorder has it, or None.

    The recorder knows those that C++ starts, too. It may hold more than one library's: gloo's and NCCL's.
    """
    pending = [
        entry
        for entry in _recorded()
        if not entry.get("is_p2p") and not entry.get("retired") and entry.get("state") != "completed"
    ]
    return min(pending, key=lambda entry: int(entry.get("time_created_ns", 0)), default=None)


def _group(entry: dict[str, Any]) -> str:
    library = str(entry.get("profiling_name", "")).split(":")[0]
    return f"{library} {entry.get('process_group')}"


def _words(entry: dict[str, Any]) -> str:
    name = str(entry.get("profiling_name", "a collective")).split(":")[-1]
    types, sizes = entry.get("input_dtypes") or [], entry.get("input_sizes") or []
    tensors = ", ".join(f"{kind.lower()}{list(size)}" for kind, size in zip(types, sizes, strict=False))
    return f"{name}({tensors}), number {entry.get('collective_seq_id')} of its group"


def _recorded() -> list[dict[str, Any]]:
    """The flight recorders' entries; none where it is not built in, or not on."""
    from torch._C import _distributed_c10d as c10d

    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(c10d, name, None)
        if dump is not None:
            entries += json.loads(dump() or "{}").get("entries") or []
    return entries
