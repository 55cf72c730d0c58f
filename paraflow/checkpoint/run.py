"""The state of a run: everything that makes a resumed one equal to one that never stopped."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paraflow.checkpoint.format import is_checkpoint, read, recover, take, verify, written_at
from paraflow.checkpoint.image import take_apart
from paraflow.checkpoint.random import random_state
from paraflow.checkpoint.writer import Writer
from paraflow.errors import CheckpointError
from paraflow.mesh import Mesh

PREFIX, DRY_RUN = "step-", ".dry-run-"
_NAME = re.compile(PREFIX + r"\d+")
Shapes = Mapping[str, tuple[int, ...]]


def save(state: dict[str, Any], mesh: Mesh, folder: Path, writer: Writer, replaces: Sequence[Path] = ()) -> None:
    """Saves a run's state, and every rank's random state with it: every rank calls it, and rank 0 writes.

    Args:
        state: The state, as one device would hold it.
        mesh: The ranks.
        folder: Where it is to be.
        writer: Writes it.
        replaces: Checkpoints that are removed when this one is there.

    Raises:
        CheckpointError: The state holds what cannot be kept; every rank raises.
    """
    image = take_apart({**state, "random": random_state(mesh)})
    if mesh.rank == 0:
        writer.save(folder, image, replaces)


def settle(writer: Writer, mesh: Mesh) -> str | None:
    """Waits until what was saved is on the disk: every rank calls it.

    Returns:
        Why it is not there, the same on every rank, or None where it is.
    """
    failure = writer.settle() if mesh.rank == 0 else None
    return mesh.gather_texts("" if failure is None else str(failure))[0] or None


def save_now(state: dict[str, Any], mesh: Mesh, folder: Path) -> None:
    """Saves a run's state, and returns when it is on the disk: every rank calls it.

    Raises:
        CheckpointError: It could not be written; every rank raises.
    """
    writer = Writer()
    save(state, mesh, folder, writer)
    failure = settle(writer, mesh)
    if failure is not None:
        raise CheckpointError(failure)


def load(path: str | Path, shapes: Shapes, mesh: Mesh | None = None) -> tuple[Path, dict[str, Any]]:
    """Returns a checkpoint's folder and the run's state in it.

    Args:
        path: A checkpoint, or a folder of them, of which the newest is taken.
        shapes: Those of the model's parameters and buffers, by name.
        mesh: The ranks, where all of them load: rank 0 finds and verifies the checkpoint for all.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or it is of another model; every rank raises.
    """
    if mesh is None:
        folder = find(path)
        verify(folder)
        return folder, _taken(folder, shapes)
    folder = Path(_told(mesh, lambda: _verified(find(path))))
    return folder, _taken_by_all(folder, shapes, mesh)


def load_newest(folders: Sequence[Path], shapes: Shapes, mesh: Mesh) -> tuple[Path, dict[str, Any], list[str]] | None:
    """Returns the newest intact checkpoint in some folders, its state, and what is wrong with those that are newer.

    None where there is no checkpoint at all: every rank calls it.

    Raises:
        CheckpointError: There are checkpoints, and none is intact; or it is of another model. Every rank raises.
    """
    told = _told(mesh, lambda: json.dumps(_newest_intact(folders)))
    name, damaged = json.loads(told)
    if name is None:
        return None
    return Path(name), _taken_by_all(Path(name), shapes, mesh), damaged


def _newest_intact(folders: Sequence[Path]) -> tuple[str | None, list[str]]:
    found = sorted((part for folder in folders for part in saved_in(folder)), key=_written_at, reverse=True)
    damaged: list[str] = []
    for part in found:
        try:
            verify(part)
        except CheckpointError as error:
            damaged.append(str(error).split(";")[0].removesuffix(" Resume from another"))
        else:
            return str(part), damaged
    if damaged:
        raise CheckpointError(f"None of the {len(damaged)} checkpoints can be resumed from. {' '.join(damaged)}")
    return None, []


def _verified(folder: Path) -> str:
    verify(folder)
    return str(folder)


def _told(mesh: Mesh, ask: Callable[[], str]) -> str:
    """What rank 0 found, on every rank; what it raised is raised on all."""
    answer, error = "", None
    if mesh.rank == 0:
        try:
            answer = "+" + ask()
        except (CheckpointError, OSError) as caught:
            error = caught if isinstance(caught, CheckpointError) else CheckpointError(f"It cannot be read: {caught}.")
            answer = f"-{error}"
    answer = mesh.gather_texts(answer)[0]
    if error is not None:
        raise error
    if answer.startswith("-"):
        raise CheckpointError(answer[1:])
    return answer[1:]


def _taken_by_all(folder: Path, shapes: Shapes, mesh: Mesh) -> dict[str, Any]:
    """Every rank's reading of a checkpoint; where one cannot, all raise."""
    state, failure = {}, ""
    try:
        state = _taken(folder, shapes)
    except CheckpointError as error:
        failure = str(error)
    failures = mesh.gather_texts(failure)
    for rank, text in enumerate(failures):
        if text and not failures[0]:
            raise CheckpointError(f"Rank {rank} cannot read what rank 0 can; put checkpoints where all can. {text}")
        if text:
            raise CheckpointError(text)
    return state


def _taken(folder: Path, shapes: Shapes) -> dict[str, Any]:
    state = take(folder)
    model = state.get("model")
    if not isinstance(model, dict) or not all(isinstance(value, torch.Tensor) for value in model.values()):
        raise CheckpointError(f"The checkpoint {str(folder)!r} holds no model: tensors by name.")
    _require_shapes(shapes, shapes_of(model), folder)
    return state


def shapes_of(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of tensors by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def load_model(module: nn.Module, path: str | Path, *, best: bool = False) -> None:
    """Gives a module the weights of a checkpoint, whatever plan saved it.

    Args:
        module: The module.
        path: A checkpoint, or a folder of them, of which the newest is taken.
        best: Whether the one with the best monitored value is taken instead.

    Raises:
        CheckpointError: There is no checkpoint, or it is of another model.
    """
    _, state = load(find(path, best=best), shapes_of(module.state_dict()))
    module.load_state_dict(state["model"])


def find(path: str | Path, *, best: bool = False) -> Path:
    """Returns the checkpoint at a path, or in a folder of checkpoints the one that was written last, or the best.

    Args:
        path: A checkpoint, or a folder of them.
        best: Whether the one with the best value of the monitored metric is wanted.

    Raises:
        CheckpointError: There is none.
    """
    folder = Path(path)
    recover(folder)
    if is_checkpoint(folder):
        return folder
    inside = saved_in(folder)
    if not inside:
        what = "has no checkpoint in it" if folder.is_dir() else "is no folder" if folder.exists() else "does not exist"
        raise CheckpointError(f"{str(path)!r} {what}; give a folder that pf.callbacks.Checkpoint has written to.")
    return _best_of(inside) if best else inside[-1]


def saved_in(folder: Path) -> list[Path]:
    """Returns the checkpoints in a folder, in the order in which they were written."""
    for old in folder.glob(f".{PREFIX}*.old"):
        recover(folder / old.name.removeprefix(".").removesuffix(".old"))
    found = [part for part in folder.glob(f"{PREFIX}*") if _NAME.fullmatch(part.name) and is_checkpoint(part)]
    return sorted(found, key=_written_at)


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
    """Removes what a process that was killed left half written or half removed; no other may be writing there."""
    for pattern in (f".{PREFIX}*.writing", f".{PREFIX}*.removing", f"{DRY_RUN}*"):
        for part in folder.glob(pattern):
            shutil.rmtree(part, ignore_errors=True)


def _written_at(checkpoint: Path) -> tuple[int, str]:
    return written_at(checkpoint), checkpoint.name


def _best_of(inside: list[Path]) -> Path:
    """The checkpoint that the newest one's callbacks hold to be the best."""
    callbacks = read(inside[-1]).get("callbacks")
    states = callbacks.values() if isinstance(callbacks, dict) else ()
    steps = [state["best_step"] for state in states if isinstance(state, dict) and state.get("best_step") is not None]
    named = [part for part in inside if int(part.name.removeprefix(PREFIX)) in steps]
    if not named:
        raise CheckpointError(
            f"{str(inside[-1].parent)!r} has no best checkpoint: nothing was monitored, or it is gone. Save with "
            "Checkpoint(folder, monitor='val_loss')."
        )
    return named[-1]


def _require_shapes(mine: Shapes, theirs: Shapes, folder: Path) -> None:
    missing, unknown = sorted(mine.keys() - theirs.keys()), sorted(theirs.keys() - mine.keys())
    both = [name for name in mine if name in theirs]
    differing = [f"{name} {theirs[name]} for {mine[name]}" for name in both if mine[name] != theirs[name]]
    parts = [
        f"it lacks {_some([f'{name} {mine[name]}' for name in missing])}" if missing else "",
        f"it has {_some([f'{name} {theirs[name]}' for name in unknown])}" if unknown else "",
        f"of another shape: {_some(differing)}" if differing else "",
    ]
    problems = "; ".join(part for part in parts if part)
    if problems:
        raise CheckpointError(f"The checkpoint {str(folder)!r} is of another model: {problems}.")


def _some(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
