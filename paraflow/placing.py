"""Brings a model to a device, and gives values to what has none: on each rank to the part that it holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paraflow.births import Birth, forget, recorded, tensors_of
from paraflow.errors import ModelError
from paraflow.parts import as_part, assembled, boxes_of, is_spread, lives_on_host

_HOST = torch.device("cpu")


def place(module: nn.Module, births: Mapping[str, Birth], device: torch.device) -> None:
    """Brings a module to a device, and gives values to what has none.

    A parameter keeps its identity. Of one that is spread over ranks only the part of this rank is made on the device;
    the host holds one whole value at a time. What is spread already has its place, which may be the host.

    Args:
        module: The module.
        births: Where the values come from, by the names that the tensors have in the module.
        device: The device.

    Raises:
        ModelError: There is a tensor without a value.
    """
    _give_values(module, births, device)
    if any(is_spread(parameter) for parameter in module.parameters()):
        if any(not is_spread(tensor) and tensor.device != device for _, tensor in tensors_of(module)):
            module._apply(  # type: ignore[no-untyped-call]
                lambda tensor: tensor if is_spread(tensor) else tensor.to(device)
            )
    else:
        module.to(device)


def _give_values(module: nn.Module, births: Mapping[str, Birth], device: torch.device) -> None:
    waiting = [(name, tensor) for name, tensor in tensors_of(module) if tensor.is_meta]
    if not waiting:
        return
    for name, tensor in waiting:
        if name not in births:
            raise ModelError(
                f"{name} is on the meta device, and nothing gives it a value. Build the model inside "
                "`with pf.deferred_init():`."
            )
        value = _value_for(tensor, births[name], _HOST if lives_on_host(tensor) else device)
        _put(module, name, tensor, value)
    _give_to_attributes(module, device)


def _value_for(tensor: torch.Tensor, birth: Birth, device: torch.device) -> torch.Tensor:
    boxes = boxes_of(tensor)
    part = assembled(birth.parts([box for _, box in boxes]), boxes).detach()
    order = torch.contiguous_format if is_spread(tensor) else torch.preserve_format
    value = part.to(device=device, dtype=tensor.dtype, copy=True, memory_format=order)
    return as_part(value, tensor) if is_spread(tensor) else value


def _put(module: nn.Module, name: str, tensor: torch.Tensor, value: torch.Tensor) -> None:
    if not isinstance(tensor, nn.Parameter):
        _replace(module, tensor, value)
        return
    parameter = nn.Parameter(value, tensor.requires_grad)
    forget(tensor)
    parameter.__dict__.update(tensor.__dict__)
    hooks: Any = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    try:
        torch.utils.swap_tensors(tensor, parameter)  # type: ignore[no-untyped-call]
    except RuntimeError:  # something refers to it weakly, as recurrent layers do
        _replace(module, tensor, parameter)
        return
    tensor._backward_hooks, tensor._post_accumulate_grad_hooks = hooks


def _replace(module: nn.Module, old: torch.Tensor, new: torch.Tensor) -> None:
    """Puts one tensor in the place of another, in every module that has it."""
    for owner in module.modules():
        for held in (owner._parameters, owner._buffers):
            for key in [key for key, tensor in held.items() if tensor is old]:
                setattr(owner, key, new)


def _give_to_attributes(module: nn.Module, device: torch.device) -> None:
    """Tensors that a module keeps without registering them, as far as pf.deferred_init has a record of them."""
    for owner in module.modules():
        for key, tensor in list(vars(owner).items()):
            birth = recorded(tensor) if isinstance(tensor, torch.Tensor) and tensor.is_meta else None
            if birth is not None:
                setattr(owner, key, _value_for(tensor, birth, device))
