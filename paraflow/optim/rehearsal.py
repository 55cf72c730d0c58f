"""Whether an optimizer updates each parameter by itself: known of torch's, tried out with small tensors for others."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch.optim import Optimizer

from paraflow.optim.kinds import is_patched, torchs_kind
from paraflow.optim.stepping import Narrow, bare_step

_STEPS = 3
_SIDE = 4
_SCALES = (1e-2, 1e2)  # of gradients: a bound on their norm over all parameters shows with large ones
_TOGETHER = ("LBFGS",)


def steps_by_parameter(optimizer: Optimizer) -> bool:
    """Whether parts of an optimizer's step, over some parameters each, give what the whole step gives, to the bit.

    Torch's optimizers do, but L-BFGS. Any other is copied with a few small tensors in its parameters' place, and
    stepped both ways; one that cannot be copied so does not, nor one with a method that was replaced on it alone, which
    may know tensors of its own.

    Example:
        >>> [steps_by_parameter(make([torch.zeros(3)])) for make in (torch.optim.AdamW, torch.optim.LBFGS)]
        [True, False]
    """
    if is_patched(optimizer):
        return False
    kind = torchs_kind(optimizer)
    if kind is not None:
        return kind.__name__ not in _TOGETHER
    try:
        return all(_same(_rehearsed(optimizer, scale, False), _rehearsed(optimizer, scale, True)) for scale in _SCALES)
    except Exception:  # whatever a class of somebody's does with tensors that are not its own
        return False


_Outcome = tuple[list[torch.Tensor], dict[Any, Any]]


def _same(one: _Outcome, other: _Outcome) -> bool:
    alike = all(torch.equal(mine, theirs) for mine, theirs in zip(one[0], other[0], strict=True))
    return alike and _equal(one[1], other[1])


def _equal(one: Any, other: Any) -> bool:
    """Whether two states are the same, tensors in them included."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _rehearsed(optimizer: Optimizer, scale: float, divided: bool) -> _Outcome:
    """The small tensors after a few steps of a copy of an optimizer, and what it keeps for no tensor."""
    twin = _twin(optimizer)
    tensors = [tensor for group in twin.param_groups for tensor in group["params"]]
    devices = list({tensor.device for tensor in tensors if tensor.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        for _ in range(_STEPS):
            for tensor in tensors:
                tensor.grad = torch.randn(tensor.shape).to(tensor) * scale
            if not divided:
                bare_step(twin)()
                continue
            narrow = Narrow(twin)
            for tensor in tensors:
                with narrow.to([tensor]):
                    bare_step(twin)()
    return tensors, {key: value for key, value in twin.state.items() if not isinstance(key, torch.Tensor)}


def _twin(optimizer: Optimizer) -> Optimizer:
    """A copy of an optimizer that holds small tensors, and of whose state and hooks nothing is left.

    What two groups share, as a list or tensor that was a default of both, their copies share.
    """
    twin: Optimizer = object.__new__(type(optimizer))
    memo: dict[int, Any] = {}
    groups = []
    for group in optimizer.param_groups:
        small = [_small(tensor) for tensor in group["params"][:2]]
        memo.update({id(tensor): small[index % len(small)] for index, tensor in enumerate(group["params"])})
        groups.append({**{k: copy.deepcopy(v, memo) for k, v in group.items() if k != "params"}, "params": small})
    for name, value in optimizer.__dict__.items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            setattr(twin, name, OrderedDict())
        elif name not in ("state", "param_groups", "step"):
            setattr(twin, name, copy.deepcopy(value, memo))
    twin.state, twin.param_groups = defaultdict(dict), groups
    return twin


def _small(tensor: torch.Tensor) -> torch.nn.Parameter:
    values = torch.arange(_SIDE ** tensor.dim(), dtype=torch.float32).reshape([_SIDE] * tensor.dim())
    return torch.nn.Parameter((values.cos() / 8).to(tensor.device, tensor.dtype))
