"""Averages of a model's weights, kept apart from the weights, under whatever plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paraflow.checkpoint.folders import find
from paraflow.checkpoint.reading import take, verify
from paraflow.checkpoint.run import give
from paraflow.errors import CheckpointError, ParaflowError
from paraflow.parts import local

if TYPE_CHECKING:
    from paraflow.engine import Engine
    from paraflow.trainer import Trainer


class Averages:
    """One average for each trained parameter: of this rank's part of it, where a plan spreads parameters over ranks.

    Updating them needs no communication. To look at them, they change places with the weights, in place and to the bit,
    so that whatever the plan does with weights is right for averages too.

    Args:
        buffers: Whether buffers of a floating dtype that are saved with the model, such as the statistics of batch
            normalisation, are averaged too.

    Attributes:
        tensors: The averages, each of its weight's shape and dtype; while `swapped`, the raw weights.
        count: Updates so far.
        swapped: Whether the averages are in the model.
        running: Whether a fit is running, between `begin` and `end`.
    """

    def __init__(self, *, buffers: bool) -> None:
        self.tensors: list[torch.Tensor] = []
        self.count = 0
        self.swapped = self.running = False
        self._engine: Engine | None = None
        self._with_buffers = buffers
        self._buffers: list[tuple[nn.Module, str]] = []
        self._loaded: dict[str, Any] | None = None

    def begin(self, trainer: Trainer) -> int:
        """Begins at the weights as they are, or goes on with what was loaded for a resumed run: a collective then.

        Returns:
            The bytes of the averages on this rank's device.

        Raises:
            ParaflowError: A parameter is in half precision, in which an average stands still.
        """
        for name, parameter in trainer.engine.module.named_parameters():
            if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
                raise ParaflowError(
                    f"{name} is {parameter.dtype}, in which an average of weights stands still: steps are below its "
                    "rounding. Keep parameters in float32 and compute in Trainer(precision='bf16')."
                )
        loaded, self._loaded = self._loaded if trainer.step else None, None
        self._engine, self.count, self.swapped, self.running = trainer.engine, 0, False, True
        self._buffers = _float_buffers(self._engine.module) if self._with_buffers else []
        self.tensors = [weight.detach().clone() for weight in self.weights]
        if loaded is not None:
            self.load_state_dict(loaded)
        return sum(local(tensor).nbytes for tensor in self.tensors)

    def end(self) -> None:
        """The fit is over; the averages stay."""
        self.running = False

    @property
    def engine(self) -> Engine:
        """The model under its plan.

        Raises:
            ParaflowError: No fit has begun.
        """
        if self._engine is None:
            raise ParaflowError("There are no averages of weights yet; they begin with fit.")
        return self._engine

    @property
    def weights(self) -> list[torch.Tensor]:
        """What is averaged, as it is in the model now."""
        buffers = (owner._buffers[leaf] for owner, leaf in self._buffers)
        return [*self.engine.parameters, *(buffer for buffer in buffers if buffer is not None)]

    @torch.no_grad()
    def follow(self) -> None:
        """Makes the averages equal to the weights."""
        for average, weight in zip(self.tensors, self.weights, strict=True):
            local(average).copy_(local(weight))

    @torch.no_grad()
    def update(self, share: float) -> None:
        """Moves each average towards its weight by a share of the way, from 0 to 1, and counts the update."""
        if share == 1:  # lerp to the end would round
            self.follow()
        else:
            # Parts by themselves, for a list must not mix those that are spread over ranks with those that are not.
            averages, weights = ([local(tensor) for tensor in tensors] for tensors in (self.tensors, self.weights))
            torch._foreach_lerp_(averages, weights, share)
        self.count += 1

    @torch.no_grad()
    def swap(self) -> None:
        """Averages and weights change places, one tensor at a time: a second time restores both to the bit."""
        for weight, average in zip(self.weights, self.tensors, strict=True):
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)
        self.swapped = not self.swapped

    def swap_out(self) -> None:
        """Puts the raw weights back in the model, if they are not there."""
        if self.swapped:
            self.swap()

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Runs a block with the averages in the model, and takes them out also when it raises."""
        if self.swapped:
            yield
            return
        self.swap()
        try:
            yield
        finally:
            self.swap_out()

    def state_dict(self) -> dict[str, Any]:
        """Returns the count, and copies of the averages by full name, spread over ranks as the weights are.

        Raises:
            ParaflowError: The averages are in the model, so that a checkpoint would have them for the raw weights.
        """
        if self._loaded is not None or self._engine is None:
            return self._loaded or {"count": 0, "averages": {}}
        if self.swapped:
            raise ParaflowError(
                "The averaged weights are in the model, and a checkpoint holds the raw ones: save before they are put "
                "there. For the averaged weights alone write trainer.engine.model_state() to a file of yours."
            )
        with self.in_model():
            model = self._engine.model_state()
            averaged = {id(weight) for weight in self.weights}
            names = [name for name, tensor in _saved(self._engine.module) if id(tensor) in averaged]
            # Copies, for without a sharding plan these are the parameters themselves, which get the raw weights back.
            averages = {name: model[name].detach().clone() for name in names}
        return {"count": self.count, "averages": averages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up averages that any plan may have saved, now or when the run begins; they may still be on disk.

        The weights are afterwards what they were, to the bit.
        """
        if not self.running:
            self._loaded = state
            return
        with torch.no_grad():
            raw = [(weight, weight.detach().clone()) for weight in self.weights]
            # By way of the engine, since only its plugins know what this rank's part of a tensor is.
            self.engine.load_model_state(state["averages"])
            self.follow()
            for tensor, value in raw:
                tensor.copy_(value)
        self.count, self.swapped = state["count"], False


def load_averages(module: nn.Module, path: str | Path, callback: str, *, best: bool = False) -> None:
    """Gives a module the weights of a checkpoint, the averaged ones where a callback kept averages of them.

    Args:
        module: The module, on one device.
        path: A checkpoint, or a folder of them, of which the newest is taken.
        callback: The class name of the callback that kept the averages.
        best: Whether the checkpoint with the best monitored value is taken instead.

    Raises:
        CheckpointError: There is no checkpoint, or no averages in it.
    """
    folder = find(path, best=best)
    verify(folder)
    state = take(folder)
    averages = state["callbacks"].get(f"{callback}-1", {}).get("averages")
    if not averages:
        raise CheckpointError(f"The checkpoint {str(folder)!r} has no averages: it was saved without {callback}.")
    give(module, {**state["model"], **averages})


def _saved(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The tensors that are saved with a module, themselves, by name: one that is used twice comes twice."""
    tensors = module.state_dict(keep_vars=True).items()
    return [(name, tensor) for name, tensor in tensors if isinstance(tensor, torch.Tensor)]


def _float_buffers(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """The owner and name of each buffer of a floating dtype that is saved with the model, each once."""
    saved = {id(tensor) for _, tensor in _saved(module)}
    found: dict[int, tuple[nn.Module, str]] = {}
    for owner in module.modules():
        for leaf, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_floating_point() and id(buffer) in saved:
                found.setdefault(id(buffer), (owner, leaf))
    return list(found.values())
