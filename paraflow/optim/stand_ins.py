"""Tensors that stand in for a model's parameters in an optimizer, and the state that goes with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paraflow.errors import ModelError
from paraflow.parts import as_part, cut, is_spread, local

_STANDS_FOR = "_paraflow_stands_for"


def stand_in(optimizer: Optimizer, tensor: torch.Tensor, after: torch.Tensor, parameter: nn.Parameter) -> None:
    """Has a tensor stand in for a parameter: what the optimizer knew of the one before it now knows of it."""
    move_state(optimizer, tensor, after)
    if after is not parameter:
        setattr(after, _STANDS_FOR, parameter)


def hold_the_models_own(optimizer: Optimizer) -> None:
    """Has an optimizer that holds stand-ins since an earlier run hold the parameters themselves again."""
    for group in optimizer.param_groups:
        for place, tensor in enumerate(group["params"]):
            parameter = getattr(tensor, _STANDS_FOR, None)
            if parameter is not None:
                move_state(optimizer, tensor, parameter)
                group["params"][place] = parameter


def follow(optimizer: Optimizer, before: Mapping[str, nn.Parameter], now: Mapping[str, nn.Parameter]) -> None:
    """Gives an optimizer that was made before a plan laid the model out its parameters as they are now.

    State that it has already goes with them, cut to this rank's part.

    Args:
        optimizer: The optimizer.
        before: The model's parameters by name, when they were whole.
        now: The same after.

    Raises:
        ModelError: It has state of a parameter that had no memory.
    """
    hold_the_models_own(optimizer)
    after = {id(old): now[name] for name, old in before.items() if name in now}
    gone = {id(old) for name, old in before.items() if name not in now}  # to other ranks
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            _require_values(optimizer, tensor)
            move_state(optimizer, tensor, after.get(id(tensor), tensor))
        for tensor in [tensor for tensor in group["params"] if id(tensor) in gone]:
            optimizer.state.pop(tensor, None)
        group["params"] = [after.get(id(tensor), tensor) for tensor in group["params"] if id(tensor) not in gone]


def _require_values(optimizer: Optimizer, tensor: torch.Tensor) -> None:
    values = optimizer.state[tensor].values() if tensor in optimizer.state else ()
    if any(isinstance(value, torch.Tensor) and value.is_meta for value in values):
        name = type(optimizer).__name__
        raise ModelError(
            f"The {name} that was given was made from parameters without memory, and what it keeps of them has no "
            f"values. Give its class, optimizer=torch.optim.{name}, and it is made when the values are there."
        )


def move_state(optimizer: Optimizer, before: torch.Tensor, after: torch.Tensor) -> None:
    """Gives an optimizer's state of one tensor to another: what is as large as it, with its part, device and dtype."""
    if after is before or before not in optimizer.state:
        return
    state: Any = optimizer.state.pop(before)
    optimizer.state[after] = {key: _moved(value, before, after) for key, value in state.items()}


def _moved(value: Any, before: torch.Tensor, after: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 0 or value.shape != before.shape:
        return value.to(after.device) if value.device == before.device else value
    if is_spread(after) and not is_spread(value) and before.shape == after.shape:
        value = cut(value, after)
    own = local(value)
    dtype = after.dtype if own.dtype == before.dtype else own.dtype
    own = alone(own.to(local(after).device, dtype))
    return as_part(own.contiguous(), after) if is_spread(after) else own


def alone(part: torch.Tensor) -> torch.Tensor:
    """Returns a part that does not keep the memory of the whole."""
    return part.clone() if part.untyped_storage().nbytes() > part.nbytes else part
