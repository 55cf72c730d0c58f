"""Writes checkpoints and removes old ones, in one queue: at once, or while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paraflow.checkpoint.format import remove, write
from paraflow.checkpoint.image import Image, take_apart
from paraflow.checkpoint.owners import claimed_in_stage
from paraflow.checkpoint.ranks import Ranks
from paraflow.checkpoint.tensors import size_of
from paraflow.errors import CheckpointError
from paraflow.optim.state import optimizer_state

if TYPE_CHECKING:
    from paraflow.engine import Engine

_ALIGNMENT = 64


class Writer:
    """Writes this rank's part of a checkpoint, and then removes what it replaces; if it cannot be written, nothing is.

    In the background a save first copies this rank's tensors to memory of its own, which is kept for the next one: as
    much host memory as what the rank writes. The copy is all that training waits for, unless the save before is not
    done yet.

    Attributes:
        background: Whether training goes on while a checkpoint is written.
    """

    def __init__(self, *, background: bool = False) -> None:
        self.background = background
        self._staging: torch.Tensor | None = None
        self._reserving: threading.Thread | None = None
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None

    def save(self, folder: Path, image: Image, replaces: Sequence[Path] = (), ranks: Ranks | None = None) -> None:
        """Writes an image to a folder, then removes other folders; `settle` tells how it went.

        Args:
            folder: Where the state is to be.
            image: The state.
            replaces: What is removed then.
            ranks: Those that write, each with its own part, where there are others.

        Raises:
            CheckpointError: The one before failed, and nobody asked.
        """
        failure = self.settle()
        if failure is not None:
            raise failure
        ranks = ranks or Ranks()
        if not self.background:
            self._write(folder, image, replaces, ranks)
            return
        try:
            copy = replace(image, tensors=self._copied(image.owned(ranks.rank)))
        except RuntimeError as error:  # raised here it would be on this rank alone
            self._fail(folder, error)
            ranks.withdraw(str(self._failure))
            return
        # Not a daemon: a process that ends waits for its checkpoint.
        self._thread = threading.Thread(
            target=self._write, args=(folder, copy, replaces, ranks), name="paraflow-checkpoint"
        )
        self._thread.start()

    def settle(self) -> CheckpointError | None:
        """Waits for what is done in the background, if anything; returns why the last save failed, once, or None."""
        for thread in (self._thread, self._reserving):
            if thread is not None:
                thread.join()
        self._thread = None
        failure, self._failure = self._failure, None
        return failure

    def _write(self, folder: Path, image: Image, replaces: Sequence[Path], ranks: Ranks) -> None:
        try:
            write(folder, image, ranks)
        except CheckpointError as error:
            self._failure = error
            return
        except Exception as error:  # in a thread nobody else would hear of it
            self._fail(folder, error)
            return
        for old in replaces:
            remove(old)

    def _fail(self, folder: Path, error: Exception) -> None:
        self._failure = CheckpointError(f"The checkpoint {str(folder)!r} could not be written: {error!r}.")
        self._failure.__cause__ = error

    def reserve(self, size: Callable[[], int]) -> None:
        """Takes memory for copies ahead of the first save, while training goes on; it costs more than the copy.

        Args:
            size: Returns how many bytes, and is asked once; where the state turns out larger, more is taken then.
        """
        if self.background and self._staging is None and self._reserving is None:
            # An eighth more: random states and meters, and what alignment takes.
            self._reserving = threading.Thread(target=self._reserve, args=(size() * 9 // 8,), name="paraflow-reserve")
            self._reserving.start()

    def _reserve(self, size: int) -> None:
        # Filled, for memory is only there once it has been written to.
        self._staging = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available()).fill_(0)

    def _copied(self, tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors, copied to the host."""
        sizes = [tensor.nbytes + -tensor.nbytes % _ALIGNMENT for tensor in tensors.values()]
        if self._staging is None or self._staging.numel() < sum(sizes):
            self._staging = None  # before the larger one is taken
            self._reserve(sum(sizes))
        assert self._staging is not None
        copies, parts = {}, torch.split(self._staging[: sum(sizes)], sizes)
        for (name, tensor), part in zip(tensors.items(), parts, strict=True):
            room = part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            source = tensor if isinstance(tensor, torch.Tensor) else tensor[...]
            copies[name] = room.copy_(source, non_blocking=True)
        if any(isinstance(tensor, torch.Tensor) and tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return copies


def size_of_part(engine: Engine) -> int:
    """Returns the bytes of parameters, buffers and optimizer state that this rank writes."""
    state = {"model": dict(engine.module.state_dict()), "optimizer": optimizer_state(engine.update)}
    return size_of(claimed_in_stage(take_apart(state), engine.mesh).owned(engine.mesh.rank))
