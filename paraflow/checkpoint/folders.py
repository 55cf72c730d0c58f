"""Folders of checkpoints: what is in them, which one is meant, and how they are kept tidy."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from paraflow.checkpoint.format import is_checkpoint, place_aside, recover, written_at
from paraflow.checkpoint.reading import take, verify
from paraflow.errors import CheckpointError
from paraflow.mesh import Mesh

PREFIX, DRY_RUN = "step-", ".dry-run-"
_NAME = re.compile(PREFIX + r"\d+")
_ASIDE = re.compile(r"\.(step-\d+)\.old")


def find(path: str | Path, *, best: bool = False) -> Path:
    """Returns the checkpoint at a path, or in a folder of checkpoints the one that was written last, or the best.

    Nothing is renamed: one whose replacement was cut short is returned where it lies (see `saved_in`).

    Args:
        path: A checkpoint, or a folder of them.
        best: Whether the one with the best value of the monitored metric is wanted.

    Raises:
        CheckpointError: There is none.
    """
    folder = Path(path)
    aside = place_aside(folder)  # looked for first: a run may put its replacement in place meanwhile
    left = not folder.exists() and is_checkpoint(aside)
    if is_checkpoint(folder):
        return folder
    if left:
        return aside
    inside = saved_in(folder)
    if not inside:
        what = "has no checkpoint in it" if folder.is_dir() else "is no folder" if folder.exists() else "does not exist"
        raise CheckpointError(f"{str(path)!r} {what}; give a folder that pf.callbacks.Checkpoint has written to.")
    return _best_of(inside) if best else inside[-1]


def saved_in(folder: Path) -> list[Path]:
    """Returns the checkpoints in a folder, in the order in which they were written.

    Between the two renames that replace a checkpoint it has no name of its own but ``.step-....old``. It is returned
    under that name, and left there: a run may be at work.
    """
    aside = [part for part in folder.glob(f".{PREFIX}*.old") if _ASIDE.fullmatch(part.name) and is_checkpoint(part)]
    found = [part for part in folder.glob(f"{PREFIX}*") if _NAME.fullmatch(part.name) and is_checkpoint(part)]
    names = {part.name for part in found}
    return sorted([*found, *(part for part in aside if _own_name(part) not in names)], key=_written_at)


def step_of(checkpoint: Path) -> int:
    """Returns the step in the name of a checkpoint that `saved_in` has returned."""
    return int(_own_name(checkpoint).removeprefix(PREFIX))


def _own_name(checkpoint: Path) -> str:
    aside = _ASIDE.fullmatch(checkpoint.name)
    return aside[1] if aside else checkpoint.name


def last_first(folders: Sequence[Path]) -> list[Path]:
    """Returns the checkpoints in a run's own folders, the one that was written last first; none is left aside."""
    for folder in folders:
        put_back(folder)
    return sorted((part for folder in folders for part in saved_in(folder)), key=_written_at, reverse=True)


def prepare(folder: Path, mesh: Mesh) -> str | None:
    """Makes a folder for checkpoints, and tidies one that is there: every rank calls it.

    Returns:
        Why no checkpoint can be written there, the same on every rank, or None where one can.
    """
    failure = ""
    if mesh.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            tidy(folder)
        except OSError as error:
            failure = f"No checkpoint can be written to {str(folder)!r}: {error.strerror}."
    return mesh.gather_texts(failure)[0] or None


def tidy(folder: Path) -> None:
    """Puts back or removes what a process that was killed left half done; no other may be writing there."""
    put_back(folder)
    for pattern in (f".{PREFIX}*.writing", f".{PREFIX}*.removing", f"{DRY_RUN}*"):
        for part in folder.glob(pattern):
            shutil.rmtree(part, ignore_errors=True)


def put_back(folder: Path) -> None:
    """Gives checkpoints whose replacement was cut short their names again; no other may be writing there."""
    for aside in folder.glob(f".{PREFIX}*.old"):
        recover(folder / _own_name(aside))


def _written_at(checkpoint: Path) -> tuple[int, str]:
    return written_at(checkpoint), _own_name(checkpoint)


def _best_of(inside: list[Path]) -> Path:
    """The checkpoint that the newest one's callbacks hold to be the best."""
    verify(inside[-1])
    callbacks = take(inside[-1]).get("callbacks")
    states = callbacks.values() if isinstance(callbacks, dict) else ()
    steps = [state["best_step"] for state in states if isinstance(state, dict) and state.get("best_step") is not None]
    named = [part for part in inside if step_of(part) in steps]
    if not named:
        raise CheckpointError(
            f"{str(inside[-1].parent)!r} has no best checkpoint: nothing was monitored, or it is gone. Save with "
            "Checkpoint(folder, monitor='val_loss')."
        )
    return named[-1]
