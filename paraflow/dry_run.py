"""A dry run: two steps of everything, a save and its restoration included, and all of it undone."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paraflow.callbacks.checkpoint import Checkpoint
from paraflow.checkpoint.image import take_apart
from paraflow.checkpoint.run import save_now
from paraflow.checkpoint.tensors import size_of
from paraflow.errors import CheckpointError
from paraflow.history import History
from paraflow.limits import Limits
from paraflow.sandbox import undone
from paraflow.state import resume, state_of

if TYPE_CHECKING:
    from paraflow.trainer import Trainer

STEPS = 2
BATCHES = 2  # of validation


def dry_run(trainer: Trainer, train: Callable[[], None], say: Callable[[str], None]) -> History:
    """Trains two steps, saves, restores, and undoes it all: a collective.

    Callbacks take part, apart from loggers and Checkpoint, which would leave something behind.

    Args:
        trainer: Its engine and run are there; a run that is resumed is dry-run from where it is.
        train: Trains until the trainer's limits.
        say: Prints a line on rank 0.

    Returns:
        What the steps measured.

    Raises:
        CheckpointError: What was restored is not what was saved.
    """
    limits, history = trainer.limits, trainer.history
    trainer.limits = Limits(None, trainer.step + STEPS)
    try:
        with undone(trainer):
            train()
            measured = History()
            measured.load_state_dict(history.state_dict(trainer.current_epoch + 1))
            size = _save_and_restore(trainer)
            steps = STEPS
    finally:
        trainer.limits = limits
    validation = f", {BATCHES} batches of validation" if trainer.validates else ""
    say(f"dry run: {steps} steps{validation}, {size:,} bytes saved and restored. All is as it was before.")
    return measured


def _save_and_restore(trainer: Trainer) -> int:
    """Saves the run aside and restores it; returns the bytes of its tensors."""
    folder = _folder(trainer)
    before = copy.deepcopy(state_of(trainer))
    try:
        save_now(before, trainer.mesh, folder)
        resume(trainer, folder)
    finally:
        trainer.mesh.barrier()  # nobody reads any more
        if trainer.is_main:
            shutil.rmtree(folder.parent, ignore_errors=True)
    saved, restored = take_apart(before), take_apart(state_of(trainer))
    differing = [name for name, tensor in saved.tensors.items() if not _same(tensor, restored.tensors.get(name))]
    if differing or json.dumps(saved.plain) != json.dumps(restored.plain):  # as text, for NaN is not equal to itself
        what = ", ".join(differing[:5]) or "what is no tensor"
        raise CheckpointError(f"What was restored is not what was saved: {what} differs. Look at load_state_dict.")
    return size_of(saved.tensors)


def _folder(trainer: Trainer) -> Path:
    """A new folder where the run's own checkpoints go, or else a temporary one; the same on every rank."""
    homes = [callback.folder for callback in trainer.callbacks if isinstance(callback, Checkpoint)]
    name = ""
    if trainer.is_main:
        for home in homes[:1]:
            home.mkdir(parents=True, exist_ok=True)
        name = tempfile.mkdtemp(prefix=".dry-run-", dir=homes[0] if homes else None)
    return Path(trainer.mesh.gather_texts(name)[0]) / "checkpoint"


def _same(left: torch.Tensor, right: Any) -> bool:
    return right is not None and torch.equal(left, right.to(left.device))
