"""Which optimizers treat each element of a parameter by itself, so that a shard can be updated like a whole."""

from __future__ import annotations

import torch

_ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "Adadelta", "Rprop", "ASGD")


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of torch's that are, or a subclass of one that keeps its step.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> is_elementwise(torch.optim.AdamW([weight])), is_elementwise(torch.optim.LBFGS([weight]))
        (True, False)
    """
    kinds = tuple(getattr(torch.optim, name) for name in _ELEMENTWISE)
    definer = next(kind for kind in type(optimizer).__mro__ if "step" in vars(kind))
    return definer in kinds
