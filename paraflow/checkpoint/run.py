"""The state of a run: everything that makes a resumed one equal to one that never stopped."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from paraflow.checkpoint.format import is_checkpoint, read, recover, write
from paraflow.checkpoint.random import random_state
from paraflow.errors import CheckpointError
from paraflow.mesh import Mesh

PREFIX = "step-"
_NAME = re.compile(PREFIX + r"\d+")
Shapes = Mapping[str, tuple[int, ...]]


def save(state: dict[str, Any], mesh: Mesh, folder: Path) -> None:
    """Saves a run's state, and every rank's random state with it: every rank calls it, and rank 0 writes.

    Raises:
        CheckpointError: It could not be written; every rank raises.
    """
    state = {**state, "random": random_state(mesh)}
    failure: CheckpointError | None = None
    if mesh.rank == 0:
        try:
            write(folder, state)
        except CheckpointError as error:
            failure = error
    failed = mesh.broadcast(float(failure is not None))
    if failure is not None:
        raise failure
    if failed:
        raise CheckpointError(f"Rank 0 could not write the checkpoint {str(folder)!r}.")


def load(path: str | Path, shapes: Shapes) -> tuple[Path, dict[str, Any]]:
    """Returns a checkpoint's folder and the run's state in it.

    Args:
        path: A checkpoint, or a folder of them, of which the newest is taken.
        shapes: Those of the model's parameters and buffers, by name.

    Raises:
        CheckpointError: There is no checkpoint, or it is of another model.
    """
    folder = find(path)
    state = read(folder)
    _require_shapes(shapes, shapes_of(state["model"]), folder)
    return folder, state


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
    return sorted(found, key=lambda part: ((part / "state.json").stat().st_mtime_ns, part.name))


def _best_of(inside: list[Path]) -> Path:
    """The checkpoint that the newest one's callbacks hold to be the best."""
    callbacks = read(inside[-1])["callbacks"]
    steps = [state["best_step"] for state in callbacks.values() if state.get("best_step") is not None]
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
        f"it lacks {_some(missing)}" if missing else "",
        f"it has {_some(unknown)}" if unknown else "",
        f"of another shape: {_some(differing)}" if differing else "",
    ]
    problems = "; ".join(part for part in parts if part)
    if problems:
        raise CheckpointError(f"The checkpoint {str(folder)!r} is of another model: {problems}.")


def _some(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
