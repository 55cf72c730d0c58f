"""Messages between the stages of a pipeline: tensors of known shapes, one message each.

Both sides know what crosses, so no shape is sent. Messages between two ranks are begun in one order on both, as a
`Schedule`'s orders say; so they match without a tag, and no set of sends and receives can wait in a circle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paraflow.mesh import Mesh
from paraflow.waiting import waits_for


class Crossing(Protocol):
    """A tensor that crosses between two stages, without its values."""

    @property
    def shape(self) -> Sequence[int]:
        """Its shape, as it is sent."""

    @property
    def dtype(self) -> torch.dtype:
        """Its type."""

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient of the same shape and type comes back."""

    @property
    def stride(self) -> Sequence[int]:
        """How it lies in memory where it was made, so that it lies alike where it arrives; empty means in order."""


class Traffic(Protocol):
    """What crosses between the stages in one micro-batch."""

    @property
    def crossing(self) -> Sequence[Sequence[Crossing]]:
        """``crossing[s]`` goes from stage s to s + 1: also what is only passed on to a later stage."""


@dataclass(slots=True)
class Message:
    """What is on its way to this rank.

    Attributes:
        tensors: Where it arrives.
        what: What it is, in words.
    """

    tensors: tuple[Tensor, ...]
    what: str
    _works: list[dist.Work]

    def wait(self) -> tuple[Tensor, ...]:
        """Returns the tensors once they are there."""
        with waits_for(self.what):
            for work in self._works:
                work.wait()
        return self.tensors


class Exchange:
    """One rank's messages along "pp".

    Args:
        mesh: The ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        # As many as are on their way at a time where ranks are in step; then waiting for the oldest takes no time.
        self._most = 4 * mesh.degree("pp")
        self._sent: deque[tuple[list[dist.Work], tuple[Tensor, ...], str]] = deque()

    def send(self, tensors: Sequence[Tensor], like: Sequence[Crossing], place: int, what: str) -> None:
        """Begins to send tensors to a place along "pp"; they are held until they have arrived.

        Args:
            tensors: Of any strides; their values must not change until `finish`.
            like: What they are, as the place that receives them knows it.
            place: Where to.
            what: What it is, in words.
        """
        if not tensors:
            return
        pairs = zip(tensors, like, strict=True)
        held = tuple(tensor.detach().permute(_memory_order(said)).contiguous() for tensor, said in pairs)
        peer, group = self._mesh.peer("pp", place), self._mesh.group("pp")
        works = [_begun(dist.isend(tensor, peer, group=group)) for tensor in held]
        self._sent.append((works, held, f"a message to rank {peer} ({what})"))
        while len(self._sent) > self._most:
            self._await_oldest()

    def receive(self, expected: Sequence[Crossing], place: int, what: str) -> Message:
        """Begins to receive tensors from a place along "pp"."""
        if not expected:
            return Message((), what, [])
        orders = [_memory_order(said) for said in expected]
        held = [
            torch.empty([said.shape[dim] for dim in order], dtype=said.dtype, device=self._mesh.device)
            for said, order in zip(expected, orders, strict=True)
        ]
        peer, group = self._mesh.peer("pp", place), self._mesh.group("pp")
        works = [_begun(dist.irecv(tensor, peer, group=group)) for tensor in held]
        tensors = tuple(t.permute(_inverse(order)) for t, order in zip(held, orders, strict=True))
        return Message(tensors, f"a message from rank {peer} ({what})", works)

    def finish(self) -> None:
        """Waits until all that was sent has arrived."""
        while self._sent:
            self._await_oldest()

    def _await_oldest(self) -> None:
        works, _, what = self._sent.popleft()
        with waits_for(what):
            for work in works:
                work.wait()


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "This rank is in the group along 'pp'."
    return work


def _memory_order(said: Crossing) -> list[int]:
    """The dimensions, outermost in memory first."""
    stride = said.stride or range(len(said.shape), 0, -1)
    return sorted(range(len(said.shape)), key=lambda dim: -stride[dim])


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=lambda place: order[place])
