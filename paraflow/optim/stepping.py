"""One step of an optimizer, taken over some of its parameters at a time.

An optimizer of torch's kind updates each parameter by its own gradient and state, so parts of a step give what the
whole gives. What is there once a step, and not once a parameter, is seen to here: the values of its groups (learning
rates, and what an optimizer counts in them), its hooks, the profiler's range, and what a schedule looks at.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from paraflow.errors import PlanError
from paraflow.optim.kinds import is_patched

Step = Callable[[], Any]

_HOOKING: Any = Optimizer.profile_hook_step(lambda: None).__code__


def as_one_step(optimizer: Optimizer, run: Callable[[Step], None]) -> None:
    """Runs what calls an optimizer's step several times so that to others it is one step.

    Args:
        optimizer: The optimizer.
        run: Is given the bare step, without hooks.
    """

    def once(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        bare = bare_step(self)
        with _without_hooks(self):
            run(lambda: bare(*args, **kwargs))

    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):  # or the schedule warns that it goes first
        optimizer._opt_called = True  # type: ignore[attr-defined]
    Optimizer.profile_hook_step(once)(optimizer)


def bare_step(optimizer: Optimizer) -> Callable[..., Any]:
    """What torch wraps its hooks around.

    Raises:
        PlanError: A method was replaced on the optimizer, which may look at all parameters at once.
    """
    if is_patched(optimizer):
        raise PlanError(
            f"[apply-groups-optimizer] A method of the {type(optimizer).__name__} was replaced after the run began, "
            "and apply_groups calls it for some parameters at a time. Leave apply_groups out, or do it in a "
            "callback.",
            rule="apply-groups-optimizer",
        )
    step: Any = type(optimizer).step
    while getattr(step, "__code__", None) is _HOOKING:  # not by its mark, which functools.wraps copies
        step = step.__wrapped__
    return step.__get__(optimizer)  # type: ignore[no-any-return]


@contextmanager
def _without_hooks(optimizer: Optimizer) -> Iterator[None]:
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before, after


class Narrow:
    """Steps over parts of an optimizer's parameters, all of them within one step.

    Args:
        optimizer: The optimizer; the values of its groups are remembered, and each part begins with them.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._values = [_Values(group) for group in optimizer.param_groups]

    @contextmanager
    def to(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Leaves the optimizer with some of its parameters, and only the groups that have any; then gives all back."""
        wanted = {id(tensor) for tensor in tensors}
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        left = []
        try:
            for group, values in zip(groups, self._values, strict=True):
                some = [tensor for tensor in group["params"] if id(tensor) in wanted]
                if some:
                    values.put_back()
                    group["params"] = some
                    left.append(group)
            self._optimizer.param_groups = left
            yield
        finally:
            self._optimizer.param_groups = groups
            for group, tensors_of_group in zip(groups, whole, strict=True):
                group["params"] = tensors_of_group


class _Values:
    """A group's own values as they were before a step."""

    def __init__(self, group: dict[str, Any]) -> None:
        self._group = group
        self._used = False
        self._plain: dict[str, Any] = {}
        self._tensors: dict[str, tuple[torch.Tensor, torch.Tensor, int]] = {}
        for key, value in group.items():
            if isinstance(value, torch.Tensor):
                self._tensors[key] = value, value.detach().clone(), value._version
            elif key != "params":
                self._plain[key] = copy.deepcopy(value) if isinstance(value, (list, dict)) else value

    def put_back(self) -> None:
        """Gives the group its values again, unless this is their first use."""
        if not self._used:
            self._used = True
            return
        for key in self._group.keys() - self._plain.keys() - self._tensors.keys() - {"params"}:
            del self._group[key]
        for key, value in self._plain.items():
            self._group[key] = copy.deepcopy(value) if isinstance(value, (list, dict)) else value
        for key, (tensor, value, version) in self._tensors.items():
            self._group[key] = tensor
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(value)
