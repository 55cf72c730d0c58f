"""What is known of an optimizer without trying it out: whose step it runs, and what that looks at."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.optim.lr_scheduler import LRScheduler

ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "Adadelta", "Rprop", "ASGD")
"""Torch's optimizers that treat each element of a parameter by itself."""

_TORCHS_WRAPPERS = {Optimizer.profile_hook_step.__code__.co_filename, LRScheduler.__init__.__code__.co_filename}


def torchs_kind(optimizer: Optimizer) -> type[Optimizer] | None:
    """Returns the class of torch whose step an optimizer runs as it is; None where a method was overridden or replaced.

    Example:
        >>> import torch
        >>> class Named(torch.optim.SGD):
        ...     name = "mine"
        >>> torchs_kind(Named([torch.zeros(2)])).__name__
        'SGD'
    """
    kinds = type(optimizer).__mro__
    first = next(place for place, kind in enumerate(kinds) if kind.__module__.startswith("torch.optim."))
    kind = kinds[first]
    if kind is Optimizer or is_patched(optimizer):
        return None
    own = [(name, value) for derived in kinds[:first] for name, value in vars(derived).items()]
    return None if any(_replaces(name, value, kind) for name, value in own) else kind


def is_patched(optimizer: Optimizer) -> bool:
    """Whether a method was replaced on the optimizer itself, as in ``optimizer.step = mine``; by others than torch."""
    return any(callable(value) and _replaces(name, value, type(optimizer)) for name, value in vars(optimizer).items())


def _replaces(name: str, value: Any, kind: type) -> bool:
    if name.startswith("__") or not hasattr(kind, name):
        return False
    return _bare(value) is not _bare(getattr(kind, name))


def _bare(method: Any) -> Any:
    """A method without what torch wraps around it: when depends on what else was made, as on who else is scheduled."""
    method = getattr(method, "__func__", method)
    while hasattr(method, "__wrapped__") and _file_of(method) in _TORCHS_WRAPPERS:
        method = method.__wrapped__
    return method


def _file_of(method: Any) -> str:
    """Where a method's code is; an object that is called in its place has none."""
    return getattr(getattr(method, "__code__", None), "co_filename", "")


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether somebody is called before or after a step of an optimizer, and may look at all gradients."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )


def is_watched(optimizer: Optimizer) -> bool:
    """Whether code that is not the optimizer's class's own runs with its step."""
    return has_step_hooks(optimizer) or is_patched(optimizer)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether a step treats each element by itself, and nobody looks on, so that a shard is updated like a whole.

    A hook, or a method that is not torch's, may take the norm of a gradient, say: of a shard it would be another.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> is_elementwise(torch.optim.AdamW([weight])), is_elementwise(torch.optim.LBFGS([weight]))
        (True, False)
    """
    kind = torchs_kind(optimizer)
    return kind is not None and kind.__name__ in ELEMENTWISE and not has_step_hooks(optimizer)
