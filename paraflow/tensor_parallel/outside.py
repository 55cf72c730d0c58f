"""How the steps of a model with split layers are called: weights that are used outside of their layers are refused."""

from __future__ import annotations

from typing import Any

from torch import nn

from paraflow.data.batch import children
from paraflow.errors import ModelError
from paraflow.parts import is_spread

_MIXED = "mixed torch.Tensor and DTensor"


class Guarded(nn.Module):
    """Calls a task's steps, and says what happened where one has used a split weight together with plain tensors.

    Args:
        steps: The steps, called as ``steps(name, batch)``.

    Example:
        >>> class Steps(nn.Module):
        ...     def forward(self, step, batch):
        ...         return batch + 1
        >>> Guarded(Steps())("training_step", 1)
        2
    """

    def __init__(self, steps: nn.Module) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, step: str, batch: Any) -> Any:
        """Runs a step.

        Raises:
            ModelError: It has used a split weight itself.
        """
        try:
            returned = self.steps(step, batch)
        except RuntimeError as error:
            if _MIXED not in str(error):
                raise
            raise ModelError(_used_outside(step)) from error
        if _holds_part(returned):  # torch adds numbers to parts; it is backward that fails
            raise ModelError(_used_outside(step))
        return returned


def _holds_part(value: Any) -> bool:
    return is_spread(value) or any(_holds_part(child) for child in children(value))


def _used_outside(step: str) -> str:
    return (
        f"{step} used the weight of a split layer outside of that layer, and a rank holds only a part of such weights. "
        "A penalty on all weights is the optimizer's weight_decay=...; for a term of a single layer keep that one "
        "whole: plan={'its.name': 'replicate'} of the plugin TensorParallel or Split."
    )
