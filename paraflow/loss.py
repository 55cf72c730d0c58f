"""The loss contract: what a step may return, and how it becomes one number with a weight.

A step returns the mean loss of its micro-batch, or ``(sum, count)``, or a dict with ``loss`` (either of the two) and,
if wanted, ``weight`` (what the mean is over), ``output`` and ``target`` for the metrics, and other scalars to log,
which are averaged with the same weights. Where a micro-batch may hold no items at all, ``(sum, count)`` is safest: a
mean over nothing is NaN.

The gradient of an optimizer step is that of the mean over all items of the whole global batch:
sum over micro-batches and ranks of weight × loss, divided by the sum of the weights.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from paraflow.errors import ModelError

_KNOWN = frozenset(("loss", "weight", "output", "target"))


@dataclass(slots=True)
class StepOutput:
    """What one micro-batch gave.

    Attributes:
        loss: The mean loss, a 0-dim tensor that gradients flow from.
        weight: The items it is a mean over: samples, or what the step counted (then perhaps a tensor on the device).
        counted: Whether the step counted its items itself; other ranks then do not know their number beforehand.
        output: What the metrics compare with the target, or None.
        target: The target, or None.
        values: Other scalars to log, as weighted means.
    """

    loss: torch.Tensor
    weight: float | torch.Tensor
    counted: bool = False
    output: Any = None
    target: Any = None
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)


def read_step(returned: Any, samples: int) -> StepOutput:
    """Reads what a step returned.

    Args:
        returned: A mean loss, ``(sum, count)`` or a dict (see the module).
        samples: The samples of the micro-batch; 0 for a stand-in, whose loss then weighs nothing.

    Raises:
        ModelError: It is none of these, or the loss is not a scalar.

    Example:
        >>> read_step((torch.tensor(6.0), 3), samples=2)
        StepOutput(loss=tensor(2.), weight=3.0, counted=True, output=None, target=None, values={})
        >>> read_step(torch.zeros(4), samples=4)
        Traceback (most recent call last):
        paraflow.errors.ModelError: The loss must be a scalar tensor, and has shape (4,); return its mean, or ...
    """
    if isinstance(returned, torch.Tensor):
        return StepOutput(_scalar(returned), samples)
    if type(returned) is dict or isinstance(returned, Mapping):  # the abstract class is slow to ask
        return _read_mapping(returned, samples)
    return _read_loss(returned, None, samples)


def _read_mapping(returned: Mapping[str, Any], samples: int) -> StepOutput:
    if "loss" not in returned:
        raise ModelError(
            f"The step returned a dict without 'loss'; it has {', '.join(map(repr, returned)) or 'nothing'}."
        )
    output = _read_loss(returned["loss"], returned.get("weight"), samples)
    output.output, output.target = returned.get("output"), returned.get("target")
    if output.counted and not isinstance(returned["loss"], tuple):
        _stop_gradient_of_nothing(output)
    if not returned.keys() <= _KNOWN:
        output.values = {key: _value(key, value) for key, value in returned.items() if key not in _KNOWN}
    return output


def _read_loss(loss: Any, weight: Any, samples: int) -> StepOutput:
    if isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[0], torch.Tensor):
        total, count = _scalar(loss[0]), loss[1] if weight is None else weight
        nothing = count == 0
        mean = total / (count + nothing)
        return StepOutput(mean, _weight(count, samples), counted=True)
    if not isinstance(loss, torch.Tensor):
        raise ModelError(
            f"The step returned {type(loss).__name__} as its loss; return a scalar tensor (the mean), a pair "
            "(sum, count), or a dict with 'loss'."
        )
    if weight is None:
        return StepOutput(_scalar(loss), samples)
    weight = _weight(weight, samples)
    if not isinstance(weight, torch.Tensor):
        weight = torch.full((), float(weight), device=loss.device)
    return StepOutput(torch.where(weight > 0, _scalar(loss), 0.0), weight, counted=True)


def _stop_gradient_of_nothing(output: StepOutput) -> None:
    """Keeps a mean over zero items, which is NaN in most models, out of the gradient.

    Hiding the NaN in forward is not enough: backward through 0 / 0 is NaN again. It is stopped where it reaches the
    model's output, so that backward still runs through the whole model and collectives in it match on every rank.
    """
    prediction = output.output
    if isinstance(prediction, torch.Tensor) and prediction.requires_grad:
        stop = partial(_where_there_are_items, torch.as_tensor(output.weight))
        prediction.register_hook(stop)  # type: ignore[no-untyped-call]


def require_no_gradient_of_nothing(
    outputs: Iterable[StepOutput], gradients: Callable[[], Sequence[torch.Tensor]]
) -> None:
    """Refuses a micro-batch without items whose backward left NaN; looked for on the host, where looking is free.

    Args:
        outputs: What the step's micro-batches gave.
        gradients: Returns the step's gradients, all micro-batches and ranks together.

    Raises:
        ModelError: There is NaN in the gradients.
    """
    counted = (output for output in outputs if output.counted and output.loss.device.type == "cpu")
    if all(float(output.weight) > 0 for output in counted):
        return
    if any(bool(gradient.isnan().any()) for gradient in gradients()):
        raise ModelError(
            "A micro-batch had 0 items, and the gradient of its mean loss is NaN. Return (sum, count) from the step, "
            "or add 'output', the model's output tensor, to its dict."
        )


def _where_there_are_items(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return torch.where(weight > 0, gradient, 0.0)


def _scalar(loss: torch.Tensor) -> torch.Tensor:
    if loss.dim() == 0:
        return loss
    if loss.numel() == 1:
        return loss.reshape(())
    raise ModelError(
        f"The loss must be a scalar tensor, and has shape {tuple(loss.shape)}; return its mean, or a pair (sum, count)."
    )


def _weight(weight: Any, samples: int) -> float | torch.Tensor:
    if samples == 0:
        return torch.zeros_like(weight) if isinstance(weight, torch.Tensor) else 0
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1:
            raise ModelError(f"The weight of a loss must be one number, and has shape {tuple(weight.shape)}.")
        return weight.detach().reshape(())
    number = float(weight) if isinstance(weight, numbers.Real) else -1.0
    if not number >= 0:
        raise ModelError(f"The weight of a loss must be a number of items, 0 or more, not {weight!r}.")
    return number


def _value(key: str, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().reshape(())
    if isinstance(value, numbers.Real):
        return torch.tensor(float(value))
    raise ModelError(
        f"The step returned {key!r} of type {type(value).__name__}; beside 'loss', 'weight', 'output' and 'target' a "
        "step's dict holds scalars to log."
    )
