"""A dry run: two steps of everything, a save and its restoration included, and all of it undone."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paraflow.callbacks.base import Callback
from paraflow.callbacks.checkpoint import Checkpoint
from paraflow.checkpoint.folders import DRY_RUN
from paraflow.checkpoint.image import Image, take_apart
from paraflow.checkpoint.owners import claimed
from paraflow.checkpoint.run import save_now
from paraflow.checkpoint.stored import Stored
from paraflow.checkpoint.tensors import size_of
from paraflow.errors import CheckpointError
from paraflow.history import History
from paraflow.limits import Limits
from paraflow.sandbox import surroundings
from paraflow.state import restore, resume, state_of

if TYPE_CHECKING:
    from paraflow.trainer import Trainer

STEPS = 2
BATCHES = 2  # of validation


class Snapshot(Callback):
    """Takes the state where a run's last checkpoint would: what comes at its end may put other weights in the model."""

    def __init__(self) -> None:
        self.state: dict[str, Any] | None = None

    def on_checkpoint(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Takes it."""
        if trainer.finishing:
            self.state = copy.deepcopy(state_of(trainer))


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
    limits, history, began = trainer.limits, trainer.history, trainer.step
    trainer.limits = Limits(None, trainer.step + STEPS)
    try:
        with undone(trainer):
            train()
            measured = History()
            measured.load_state_dict(history.state_dict(trainer.current_epoch + 1))
            size = _save_and_restore(trainer)
            steps = trainer.step - began
    finally:
        trainer.limits = limits
    validation = f", validation of at most {BATCHES} batches" if trainer.validates else ""
    say(f"dry run: {steps} steps{validation}, {size:,} bytes saved and restored. The run is as it was before.")
    return measured


@contextmanager
def undone(trainer: Trainer) -> Iterator[None]:
    """Runs a block that may train in every way; afterwards the run's state is as it was before.

    Callbacks hear of everything; they are given their state of before back, and keep what is not in it.
    """
    state = copy.deepcopy(state_of(trainer))
    with surroundings(trainer.engine):
        try:
            yield
        finally:
            restore(trainer, state)


def _save_and_restore(trainer: Trainer) -> int:
    """Saves the run aside and restores it; returns the bytes of its tensors."""
    folder, made = _folder(trainer)
    taken = next((callback.state for callback in trainer.callbacks if isinstance(callback, Snapshot)), None)
    before = taken or copy.deepcopy(state_of(trainer))
    try:
        save_now(before, trainer.mesh, folder)
        resume(trainer, folder)
    finally:
        trainer.mesh.barrier()  # nobody reads any more
        if trainer.is_main:
            shutil.rmtree(folder.parent, ignore_errors=True)
            for home in made:
                with contextlib.suppress(OSError):  # somebody else may have put something in it
                    home.rmdir()
    mesh, rank = trainer.mesh, trainer.mesh.rank
    saved, restored = (claimed(take_apart(state), mesh) for state in (before, state_of(trainer)))
    said = [
        text.split(" ", 1)
        for text in mesh.gather_texts(f"{size_of(saved.owned(rank))} {_difference(saved, restored, rank)}")
    ]
    what = next((what for _, what in said if what), "")
    if what:
        raise CheckpointError(f"What was restored is not what was saved: {what} differs. Look at load_state_dict.")
    return sum(int(size) for size, _ in said)


def _difference(saved: Image, restored: Image, rank: int) -> str:
    """Names what differs between two images in what a rank has saved, or returns nothing.

    What others have beside it may be their own, such as statistics of batch normalisation.
    """
    owned = saved.owned(rank)
    differing = [name for name, tensor in owned.items() if not _same(tensor, _held(name, restored, saved))]
    alike = rank > 0 or json.dumps(saved.plain) == json.dumps(restored.plain)  # as text: NaN is not equal to itself
    return ", ".join(differing[:5]) or ("" if alike else "what is no tensor")


def _held(name: str, restored: Image, saved: Image) -> Any:
    """What was restored of what a rank has saved; where it is still on disk, the same part of it is read."""
    place = saved.places.get(name)
    tensor = restored.tensors.get(name, None if place is None else restored.tensors.get(place.path))
    if not isinstance(tensor, Stored):
        return tensor
    if place is None:
        return tensor[...]
    sizes = saved.tensors[name].shape
    return tensor[tuple(slice(start, start + size) for start, size in zip(place.offset, sizes, strict=True))]


def _folder(trainer: Trainer) -> tuple[Path, list[Path]]:
    """A new folder where the run's own checkpoints go, or else a temporary one, and the folders made to hold it.

    Raises:
        CheckpointError: It cannot be made; every rank raises.
    """
    homes = [callback.folder for callback in trainer.callbacks if isinstance(callback, Checkpoint)]
    name, failure, made = "", "", []
    if trainer.is_main:
        try:
            for home in homes[:1]:
                made = [part for part in (home, *home.parents) if not part.exists()]
                home.mkdir(parents=True, exist_ok=True)
            name = tempfile.mkdtemp(prefix=DRY_RUN, dir=homes[0] if homes else None)
        except OSError as error:
            failure = f"A dry run cannot save where the run would: {error}."
    name, failure = (trainer.mesh.gather_texts(text)[0] for text in (name, failure))
    if failure:
        raise CheckpointError(failure)
    return Path(name) / "checkpoint", made


def _same(left: torch.Tensor, right: Any) -> bool:
    if right is None or left.shape != right.shape or left.dtype != right.dtype:
        return False
    other = right.to(left.device)
    return bool(((left == other) | ((left != left) & (other != other))).all())  # NaN is not equal to itself
