"""A pipeline in one process: stage after stage, each on its own hollow copy of the model, then backward by hand."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paraflow.pipelining.replay import Replay
from paraflow.pipelining.trace import Traffic
from paraflow.step import Boundary

Step = Callable[[Any], Any]


@dataclass
class Stage:
    """One stage: its copy of the model, its replay, what it received and what it gave."""

    model: nn.Module
    replay: Replay
    traffic: Traffic
    received: list[Tensor]
    given: Any = None


def forward(model: nn.Module, stages: Sequence[Sequence[str]], step: Step, kept: Iterable[str] = ()) -> list[Stage]:
    """Runs the stages one after another.

    Args:
        model: The model; it is copied for each stage.
        stages: The units of each stage.
        step: Runs the step of the model it is given.
        kept: Parameters that stay on every stage.
    """
    made: list[Stage] = []
    received: list[Tensor] = []
    for number in range(len(stages)):
        own = copy.deepcopy(model)
        replay = Replay(own, stages)
        _hollow(own, [name for other, names in enumerate(stages) if other != number for name in names], set(kept))
        traffic = replay.trace(lambda own=own: step(own))
        given = replay.run(number, lambda own=own: step(own), received, traffic)
        made.append(Stage(own, replay, traffic, received, given))
        assert traffic.slots == made[0].traffic.slots, "all stages see the same"
        if number < len(stages) - 1:
            assert isinstance(given, Boundary)
            metas = traffic.crossing[number]
            for tensor, meta in zip(given.tensors, metas, strict=True):
                assert (tuple(tensor.shape), tensor.dtype) == (meta.shape, meta.dtype)
                assert tensor.requires_grad == meta.requires_grad
            received = [
                tensor.detach().clone().requires_grad_(meta.requires_grad)
                for tensor, meta in zip(given.tensors, metas, strict=True)
            ]
    return made


def backward(stages: list[Stage], loss: Tensor) -> dict[str, Tensor]:
    """Runs backward through all stages; returns the gradients by name, summed over the stages that have the weight."""
    loss.backward()  # type: ignore[no-untyped-call]
    for before, after in reversed(list(itertools.pairwise(stages))):
        flows = [(t, r.grad) for t, r in zip(before.given.tensors, after.received, strict=True) if t.requires_grad]
        flows = [(t, torch.zeros_like(t) if grad is None else grad) for t, grad in flows]
        torch.autograd.backward([t for t, _ in flows], [grad for _, grad in flows])
    gradients: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0) + parameter.grad
    return gradients


def assert_same(
    model: nn.Module, stages: Sequence[Sequence[str]], step: Step, kept: Iterable[str] = (), tolerance: float = 1e-6
) -> list[Stage]:
    """The loss and the gradients of the stages are those of the whole model; `step` returns the loss."""
    whole = copy.deepcopy(model)
    expected = step(whole)
    expected.backward()
    made = forward(model, stages, step, kept)
    loss = made[-1].given
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    gradients = backward(made, loss)
    for name, parameter in whole.named_parameters():
        found = gradients.get(name)
        if parameter.grad is None:
            assert found is None or not found.any(), name
            continue
        assert found is not None, f"{name} has no gradient"
        scale = max(1.0, float(parameter.grad.abs().max()))
        assert float((found - parameter.grad).abs().max()) <= tolerance * scale, name
    return made


def shapes(made: list[Stage]) -> list[list[tuple[int, ...]]]:
    """The shapes that cross each boundary."""
    return [[meta.shape for meta in crossing] for crossing in made[0].traffic.crossing]


def _hollow(model: nn.Module, units: Sequence[str], kept: set[str]) -> None:
    stays = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in kept}
    for name in units:
        for module in model.get_submodule(name).modules():
            for leaf, parameter in module._parameters.items():
                if id(parameter) not in stays:
                    module._parameters[leaf] = None
            for leaf in module._buffers:
                module._buffers[leaf] = None
