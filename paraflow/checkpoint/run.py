"""The state of a run: everything that makes a resumed one equal to one that never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from paraflow.checkpoint.format import read, write
from paraflow.checkpoint.random import random_state, restore_random_state
from paraflow.errors import CheckpointError

if TYPE_CHECKING:
    from paraflow.trainer import Trainer

PREFIX = "step-"


def save(trainer: Trainer, folder: Path) -> None:
    """Saves a run between two steps: every rank calls it, and rank 0 writes.

    Raises:
        CheckpointError: It could not be written; every rank raises.
    """
    state = trainer.state_dict()
    state["random"] = random_state(trainer.mesh)
    failure: CheckpointError | None = None
    if trainer.is_main:
        try:
            write(folder, state)
        except CheckpointError as error:
            failure = error
    failed = trainer.mesh.broadcast(float(failure is not None))
    if failure is not None:
        raise failure
    if failed:
        raise CheckpointError(f"Rank 0 could not write the checkpoint {str(folder)!r}.")


def restore(trainer: Trainer, path: str | Path) -> Path:
    """Takes up a saved run; returns the folder it was read from.

    Raises:
        CheckpointError: There is no checkpoint, or it is of another model.
    """
    folder = find(path)
    state = read(folder)
    require_same_model(trainer.engine.module, state["model"], folder)
    trainer.load_state_dict(state)
    restore_random_state(state["random"], trainer.mesh)
    return folder


def load_model(module: nn.Module, path: str | Path) -> None:
    """Gives a module the weights of a checkpoint, whatever plan saved it.

    Args:
        module: The module.
        path: A checkpoint, or a folder of them, of which the newest is taken.

    Raises:
        CheckpointError: There is no checkpoint, or it is of another model.
    """
    folder = find(path)
    saved = read(folder)["model"]
    require_same_model(module, saved, folder)
    module.load_state_dict(saved)


def find(path: str | Path) -> Path:
    """Returns the checkpoint at a path, or the newest in a folder of checkpoints.

    Raises:
        CheckpointError: There is none.
    """
    folder = Path(path)
    if (folder / "state.json").is_file():
        return folder
    inside = saved_in(folder)
    if not inside:
        what = "has no checkpoint in it" if folder.is_dir() else "does not exist"
        raise CheckpointError(f"{str(path)!r} {what}; give a folder that pf.callbacks.Checkpoint has written to.")
    return inside[-1]


def saved_in(folder: Path) -> list[Path]:
    """Returns the checkpoints in a folder, oldest step first."""
    found = [part for part in folder.glob(f"{PREFIX}*") if (part / "state.json").is_file()]
    return sorted(found, key=lambda part: int(part.name.removeprefix(PREFIX)))


def require_same_model(module: nn.Module, saved: dict[str, Any], folder: Path) -> None:
    """Refuses a checkpoint of another model.

    Raises:
        CheckpointError: Its names or shapes differ from the module's.
    """
    mine = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    missing, unknown = sorted(mine.keys() - theirs.keys()), sorted(theirs.keys() - mine.keys())
    differing = [
        f"{name} {theirs[name]} for {mine[name]}" for name in mine if name in theirs and mine[name] != theirs[name]
    ]
    parts = [
        f"it lacks {_some(missing)}" if missing else "",
        f"it has {_some(unknown)}" if unknown else "",
        f"of another shape: {_some(differing)}" if differing else "",
    ]
    problems = "; ".join(part for part in parts if part)
    if problems:
        raise CheckpointError(
            f"The checkpoint {str(folder)!r} is of another model than {type(module).__name__}: {problems}."
        )


def _some(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
