"""One run of a stage's part of a step: calls of earlier stages are looked up, its own are run."""

from __future__ import annotations

from collections.abc import Callable, Collection, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from paraflow.errors import ModelError
from paraflow.pipelining.absent import Absent, Key, Slot, at_line, outlived
from paraflow.pipelining.trace import Event, Given, Glue, Traffic, target_of
from paraflow.pipelining.values import rebuilt, tensors_in


class OwnPart(Protocol):
    """Makes the context in which what only one stage has is run."""

    def __call__(self, *, everything: bool) -> AbstractContextManager[None]:
        """Has random numbers of torch be the stage's own; of numpy and Python, too, if everything is to be."""


class Left(BaseException):
    """The step has called a unit of a later stage: it is left."""


class Running(Glue):
    """Runs one stage's part of a step.

    Args:
        own: The stage.
        received: What the stage before sent.
        traffic: What was traced.
        buffers: The ids of the buffers of units.
        own_part: Makes the context in which units are run, and functions that draw.
    """

    def __init__(
        self,
        own: int,
        received: Sequence[Tensor],
        traffic: Traffic,
        buffers: Collection[int],
        own_part: OwnPart,
    ) -> None:
        super().__init__()
        self._own = own
        self._traffic = traffic
        self._buffers = buffers
        self._own_part = own_part
        self._mine: MutableMapping[Tensor, Key] = (
            WeakTensorKeyDictionary()
        )  # the tensors that depend on units or weights
        self._sent = {slot.key for slot in traffic.slots[own]} if own < len(traffic.slots) else set()
        coming = traffic.slots[own - 1] if own else ()
        if len(coming) != len(received):
            raise ValueError(f"stage {own} takes {len(coming)} tensors, and {len(received)} were received")
        self._values: dict[Key, Tensor] = {}
        for slot, tensor in zip(coming, received, strict=True):
            self._values[slot.key] = tensor.clone() if slot.key in traffic.written[own] else tensor
            self._mine[self._values[slot.key]] = slot.key

    def depends(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on weights or on what units gave."""
        return tensor in self._mine or id(tensor) in self._buffers or super().depends(tensor)

    def enter_unit(self, name: str, stage: int, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a unit of the own stage; leaves the step where a later stage begins.

        Raises:
            Left: The unit belongs to a later stage.
        """
        if stage > self._own:
            raise Left
        self.move_to(stage)
        return self.event(name, inner, args, kwargs, tensors_in((args, kwargs)))

    def event(
        self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]
    ) -> Any:
        """Runs a numbered call on the own stage, and looks it up on others."""
        event = self._next(name)
        if self.stage < self._own:
            result = self.filled(event.result, given)
            for write in event.writes:
                self.ghosts[target_of(given[write.index], write)] = Absent.like(write.slot, self.run)
            return result
        args, kwargs = rebuilt((args, kwargs), self.value)
        with self._own_part(everything=event.draws_others) if event.draws else nullcontext():
            result = func(*args, **kwargs)
        self._remember(result, event, given)
        return result

    def _next(self, name: str) -> Event:
        events = self._traffic.events
        if self.number >= len(events) or events[self.number].name != name:
            expected = f"'{events[self.number].name}'" if self.number < len(events) else "the end of the step"
            raise ModelError(
                f"The step calls '{name}'{at_line()}, where it came to {expected} when it was traced on a micro-batch "
                "of the same shapes. Under a pipeline Python code outside of the layers must take the same way for all "
                "batches of a shape: write it with tensors (torch.where), or move it into the forward of a module that "
                "has parameters."
            )
        self.number += 1
        return events[self.number - 1]

    def _remember(self, result: Any, event: Event, given: list[Tensor]) -> None:
        leaves = tensors_in(result)
        slots: list[Slot | Given] = tensors_in(event.result, (Slot, Given))
        if len(leaves) != len(slots):
            raise ModelError(
                f"'{event.name}' returned {len(leaves)} tensors{at_line()}, and {len(slots)} when it was traced on a "
                "micro-batch of the same shapes. Under a pipeline a layer returns the same number for all batches of a "
                "shape."
            )
        for leaf, slot in zip(leaves, slots, strict=True):
            if isinstance(slot, Slot):
                self._keep(leaf, slot.key)
            elif leaf not in self._mine:
                self._mine[leaf] = self._key_of(given[slot.index])
        for write in event.writes:
            self._keep(target_of(given[write.index], write), write.slot.key)

    def _keep(self, tensor: Tensor, key: Key) -> None:
        self._mine[tensor] = key
        if key in self._sent:
            self._values[key] = tensor

    def _key_of(self, tensor: Tensor) -> Key:
        tensor = self.absent_or(tensor)
        return tensor.slot.key if isinstance(tensor, Absent) else self._mine.get(tensor, "")

    def value(self, tensor: Tensor) -> Tensor:
        """Returns a tensor with values: what was received for one of another stage.

        Raises:
            ModelError: It is not here.
        """
        absent = self.absent_or(tensor)
        if not isinstance(absent, Absent):
            return tensor
        if absent.present is None:
            if absent.owner is not None and absent.owner is not self.run:
                raise outlived(absent)
            absent.present = self._here(absent.slot.key)
        return absent.present

    def _here(self, key: Key) -> Tensor:
        if isinstance(key, str):
            raise ModelError(
                f"'{key}' is a weight of another stage of the pipeline, and stage {self._own} uses it{at_line()}, in "
                "code outside of the layer that has it. Put what uses it in that layer's stage, or name it among the "
                f"weights that several stages have: pf.plugins.Pipeline(..., shared=['{key}'])."
            )
        if key not in self._values:
            raise ModelError(
                f"Stage {self._own} of the pipeline uses a value of an earlier stage{at_line()} that it did not use "
                "when the step was traced on a micro-batch of the same shapes. Under a pipeline Python code outside of "
                "the layers must take the same way for all batches of a shape."
            )
        return self._values[key]

    def boundary(self) -> tuple[Tensor, ...]:
        """Returns what goes to the next stage.

        Raises:
            ModelError: It is not what was traced.
        """
        return tuple(self._outgoing(slot) for slot in self._traffic.slots[self._own])

    def _outgoing(self, slot: Slot) -> Tensor:
        tensor = self._here(slot.key)
        if tuple(tensor.shape) != slot.meta.shape:
            raise ModelError(
                f"Stage {self._own} of the pipeline gives the next one a tensor of shape {list(tensor.shape)}, and one "
                f"of {list(slot.meta.shape)} when the step was traced. Under a pipeline shapes must depend on the "
                "shapes of the batch only."
            )
        # What shards a layer may compute in another precision than the layer by itself.
        return tensor if tensor.dtype == slot.meta.dtype else tensor.to(slot.meta.dtype)
