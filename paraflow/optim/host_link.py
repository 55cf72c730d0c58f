"""Gradients on their way to where the optimizer's copies are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paraflow.optim.held import Held
from paraflow.parts import local


@dataclass(slots=True)
class Fetched:
    """Gradients that are there, or on their way.

    Attributes:
        gradients: What each of a group's tensors is to have as its gradient.
        arrived: After what they are there; None where they are.
    """

    gradients: list[tuple[Held, torch.Tensor | None]]
    arrived: torch.cuda.Event | None

    def give(self) -> None:
        """Waits for the gradients, and gives them to what the optimizer holds."""
        if self.arrived is not None:
            self.arrived.synchronize()
        for held, gradient in self.gradients:
            if not held.is_itself:
                held.tensor.grad = None if gradient is None else gradient.to(held.tensor.dtype)

    def take(self) -> None:
        """Takes the gradients away again, frees them, and gives the model the weights that were made with them."""
        for held, gradient in self.gradients:
            if held.is_itself:
                continue
            held.tensor.grad = None
            if held.is_copy and gradient is not None:
                held.put_back()
        self.gradients.clear()


class HostLink:
    """Copies gradients to the host, on a CUDA device beside what else it does.

    Pinned memory comes from torch's own cache of it, which gives a block out again once its copies are done.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def begin(self, held: Sequence[Held]) -> None:
        """Has later copies wait for the gradients that are being computed."""
        device = next((local(one.parameter).device for one in held if one.is_copy), torch.device("cpu"))
        if device.type != "cuda":
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def fetch(self, share: Sequence[Held]) -> Fetched:
        """Begins to copy the gradients of a group."""
        if self._stream is None or not any(one.is_copy for one in share):
            return Fetched([(one, _gradient(one)) for one in share], None)
        with torch.cuda.stream(self._stream):
            gradients = [(one, _gradient(one)) for one in share]
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        return Fetched(gradients, arrived)


def _gradient(held: Held) -> torch.Tensor | None:
    """The gradient of a parameter; of one that has a copy, a copy too."""
    if held.parameter.grad is None:
        return None
    gradient = local(held.parameter.grad) if not held.is_itself else held.parameter.grad
    if not held.is_copy:
        return gradient
    if gradient.layout is not torch.strided:
        return gradient.to(held.tensor.device)
    place = torch.empty_like(gradient, device=held.tensor.device, pin_memory=gradient.device.type == "cuda")
    return place.copy_(gradient.detach(), non_blocking=True)
