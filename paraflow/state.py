"""A run's whole state, out of the Trainer and back into it, and which checkpoint a run goes on from."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from paraflow.callbacks.checkpoint import Checkpoint
from paraflow.checkpoint.random import restore_random_state
from paraflow.checkpoint.run import load, load_newest
from paraflow.errors import CheckpointError, ParaflowError
from paraflow.watch.signals import interruption

if TYPE_CHECKING:
    from paraflow.trainer import Trainer


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Returns a run's state, all but random state, as one device would hold it: a collective.

    Raises:
        ParaflowError: A step has begun and something of it is still to come, so its batch would be lost.
    """
    state = {
        **trainer.engine.state_dict(),
        "plan": trainer.plan.to_dict(),
        "about": _about(trainer.engine.module),
        "counters": {"step": trainer.step, "epoch": trainer.epoch},
        "run": trainer.run.state_dict(),
        "history": trainer.history.state_dict(trainer.epoch),
        "callbacks": trainer.dispatcher.state_dict(),
    }
    if not trainer.dispatcher.between_steps:  # asked last: what a callback has against it says more
        raise ParaflowError(
            "A run can be saved between two steps only, and a step has begun whose batch would be lost. Save in "
            "on_checkpoint or on_epoch_end, or let pf.callbacks.Checkpoint do it."
        )
    return state


def _about(module: nn.Module) -> dict[str, Any]:
    """What the model is, for those who read a checkpoint without it: its class, and a transformers model's configs."""
    about: dict[str, Any] = {"model_class": type(module).__name__}
    if not hasattr(getattr(module, "config", None), "model_type"):
        return about
    for name in ("config", "generation_config"):
        config: Any = getattr(module, name, None)
        if hasattr(config, "to_dict"):
            with contextlib.suppress(TypeError, ValueError):  # a config that is not JSON is left out
                about[name] = json.loads(json.dumps(config.to_dict()))
    return about


def restore(trainer: Trainer, state: dict[str, Any]) -> None:
    """Gives a trainer a run's state, saved under whatever plan."""
    trainer.engine.load_state_dict(state)
    _keep_division(trainer, state["plan"])
    trainer.run.load_state_dict(state["run"])
    trainer.history.load_state_dict(state["history"])
    trainer.dispatcher.load_state_dict(dict(state["callbacks"]))
    trainer.step, trainer.epoch = (_count(state["counters"][name]) for name in ("step", "epoch"))


def _keep_division(trainer: Trainer, saved: dict[str, Any]) -> None:
    """Goes on with the saved number of micro-batches, where ``auto`` would choose it anew from today's free memory.

    Another number sums in another order, and the run would not be bit-equal.
    """
    plan, accumulate = trainer.plan, saved["accumulate"]
    if not trainer.chooses_accumulation or accumulate == plan.accumulate or saved["dp"] != plan.dp:
        return
    trainer.engine.plan = plan.with_fields(accumulate=accumulate)
    reader = trainer.run.feed.reader
    trainer.run.feed.reader = replace(reader, division=replace(reader.division, accumulate=accumulate))


def _count(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


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
    failure, cause, own = "", None, None
    try:
        restore(trainer, state)
        restore_random_state(state["random"], trainer.mesh)
    except ParaflowError as error:  # some are ValueErrors too, and say it better
        failure, own = str(error), error
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        failure, cause = f"{type(error).__name__}: {error}", error
    # What is a rank's own, such as its random state or its part of a tensor, may fail on that rank alone.
    failures = [text for text in trainer.mesh.gather_texts(failure) if text]
    if own is not None:
        raise own
    if failures:
        raise CheckpointError(
            f"The checkpoint {str(folder)!r} does not hold what a run needs: {failures[0]}. Resume with the model, "
            "optimizer, data and callbacks that it was saved with."
        ) from cause
    done = "; the run is complete" if trainer.finishing else ""
    return [f"resumed from {folder} at step {trainer.step}{done}"]


def interrupted(trainer: Trainer, signal: int) -> BaseException:
    """Says what becomes of a run that a signal has ended, and returns what is raised for it."""
    if trainer.progress and trainer.is_main:
        saving = [callback for callback in trainer.callbacks if isinstance(callback, Checkpoint)]
        saved = ", ".join(str(callback.last_path) for callback in saving if callback.last_path)
        said = f"saved in {saved}; fit(..., resume='auto') goes on from there" if saved else "nothing was saved"
        why = "" if saving else ": the run has no Checkpoint"
        trainer.console.print(f"interrupted after step {trainer.step}: {said}{why}", highlight=False, soft_wrap=True)
    return interruption(signal)
