"""A run's whole state, out of the Trainer and back into it, and which checkpoint a run goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paraflow.callbacks.checkpoint import Checkpoint
from paraflow.checkpoint.random import restore_random_state
from paraflow.checkpoint.run import load, load_newest
from paraflow.errors import CheckpointError, ParaflowError

if TYPE_CHECKING:
    from paraflow.trainer import Trainer


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Returns a run's state, all but random state, as one device would hold it: a collective."""
    return {
        **trainer.engine.state_dict(),
        "plan": trainer.plan.to_dict(),
        "counters": {"step": trainer.step, "epoch": trainer.epoch},
        "run": trainer.run.state_dict(),
        "history": trainer.history.state_dict(trainer.epoch),
        "callbacks": trainer.dispatcher.state_dict(),
    }


def restore(trainer: Trainer, state: dict[str, Any]) -> None:
    """Gives a trainer a run's state, saved under whatever plan."""
    trainer.engine.load_state_dict(state)
    trainer.run.load_state_dict(state["run"])
    trainer.history.load_state_dict(state["history"])
    trainer.dispatcher.load_state_dict(state["callbacks"])
    trainer.step, trainer.epoch = state["counters"]["step"], state["counters"]["epoch"]


def resume(trainer: Trainer, path: str | Path) -> list[str]:
    """Restores a run from a checkpoint, random state included: a collective.

    Args:
        trainer: Its engine and run are there.
        path: A checkpoint, a folder of them, or ``"auto"``: the newest intact one that the run's own `Checkpoint`
            callbacks have written, if there is any.

    Returns:
        What to tell the user.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged, or of another model.
        ParaflowError: ``"auto"`` was asked for in a run that saves nothing.
    """
    shapes, mesh = trainer.engine.shapes, trainer.mesh
    if path != "auto":
        folder, state = load(path, shapes, mesh)
        return _take_up(trainer, folder, state)
    folders = list(dict.fromkeys(callback.folder for callback in trainer.callbacks if isinstance(callback, Checkpoint)))
    if not folders:
        raise ParaflowError(
            "resume='auto' takes up what the run's own Checkpoint callback has saved, and it has none. Write "
            "Trainer(callbacks=[pf.callbacks.Checkpoint('runs/mine')]), or resume='runs/mine'."
        )
    found = load_newest(folders, shapes, mesh)
    if found is None:
        return [f"nothing to resume from in {', '.join(map(str, folders))}: starting at step 0"]
    folder, state, damaged = found
    return [*(f"left out: {text}" for text in damaged), *_take_up(trainer, folder, state)]


def _take_up(trainer: Trainer, folder: Path, state: dict[str, Any]) -> list[str]:
    try:
        restore(trainer, state)
        restore_random_state(state["random"], trainer.mesh)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"The checkpoint {str(folder)!r} does not hold what a run needs: {type(error).__name__}: {error}. Resume "
            "with the model, optimizer, data and callbacks that it was saved with."
        ) from error
    return [f"resumed from {folder} at step {trainer.step}"]
