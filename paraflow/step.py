"""What surrounds one optimizer step: who listens, and what it gave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paraflow.data.batch import map_tensors
from paraflow.loss import StepOutput

Listener = Callable[[], None]


@dataclass
class StepHooks:
    """What the engine calls while it runs a step; empty where nobody listens.

    Attributes:
        bytes_held: The bytes that those who listen hold on this rank's device.
    """

    micro_batch_begin: tuple[Listener, ...] = ()
    micro_batch_end: tuple[Listener, ...] = ()
    before_backward: tuple[Listener, ...] = ()
    after_backward: tuple[Listener, ...] = ()
    before_optimizer_step: tuple[Listener, ...] = ()
    after_optimizer_step: tuple[Listener, ...] = ()
    bytes_held: Callable[[], int] = lambda: 0


@dataclass(slots=True)
class StepResult:
    """What one optimizer step gave.

    Attributes:
        outputs: What each of this rank's micro-batches gave.
        totals: The sums (weight × loss, weight) over all ranks, where the step exchanged them, else None.
        norm: The global gradient norm, where a plugin measured it, else None.
        stepped: Whether the optimizer stepped.
    """

    outputs: list[StepOutput]
    totals: torch.Tensor | None
    norm: torch.Tensor | None
    stepped: bool


@dataclass(slots=True)
class Boundary:
    """What a step returns on a rank that runs only the beginning or the middle of the model.

    Attributes:
        tensors: What later ranks go on from; backward starts from the gradients that they send.
    """

    tensors: tuple[torch.Tensor, ...]


class StepAbandoned(Exception):
    """A step was given up on all ranks before its optimizer stepped."""


def release_graph(output: StepOutput, *, keep_output: bool = True) -> None:
    """Detaches what a step gave from its graph, which would otherwise live until the next step."""
    output.loss = output.loss.detach()
    if not keep_output:
        output.output = output.target = None
    elif output.output is not None:
        output.output = map_tensors(torch.Tensor.detach, output.output)
