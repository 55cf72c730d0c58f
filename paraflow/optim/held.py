"""What an optimizer holds for a parameter of the model, and whether the two still agree."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from paraflow.parts import is_spread, local

_AS_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class Held:
    """What the optimizer holds for one parameter of the model.

    Attributes:
        name: The parameter's name in the bare module.
        parameter: The model's own parameter, as the plugins left it; it may be sharded.
        tensor: What the optimizer holds: the parameter itself, this rank's shard of it, or a copy on the host.
        is_copy: Whether the tensor has memory of its own, so that gradients and weights are copied.
        versions: How often the parameter had been changed in place when a copy last agreed with it.
        fingerprint: A number of the values that it then had: 0-dim int64, on its device.
    """

    name: str
    parameter: nn.Parameter
    tensor: torch.Tensor
    is_copy: bool = False
    versions: tuple[int, ...] = ()
    fingerprint: torch.Tensor | None = None

    @property
    def is_itself(self) -> bool:
        """Whether the optimizer holds the model's own parameter."""
        return self.tensor is self.parameter

    @property
    def is_finer(self) -> bool:
        """Whether the tensor is a copy that has digits which the parameter has not: a master weight."""
        return self.is_copy and self.tensor.dtype != self.parameter.dtype

    @property
    def bytes(self) -> int:
        """The bytes of what is held, over all ranks where it is spread over them: alike on each that steps as one."""
        return self.tensor.numel() * self.tensor.element_size() if self.parameter.requires_grad else 0

    def hold(self, tensor: torch.Tensor) -> None:
        """Holds another tensor from now on, which agrees with the parameter."""
        self.tensor = tensor
        self.is_copy = not self.is_itself and not _share_memory(local(tensor), local(self.parameter))
        if self.is_copy:
            self.agree()

    def agree(self) -> None:
        """Notes that the copy and the parameter have the same value now."""
        self.versions = _versions(self.parameter)
        self.fingerprint = _fingerprint(self.parameter)

    def take_up(self) -> None:
        """Gives a copy the parameter's value; where it is only the parameter's, rounded less, it stays as it is.

        A master weight outlives so what puts other weights into a model for a while, and then puts its own back.
        """
        with torch.no_grad():
            value = local(self.parameter).to(self.tensor.device)
            if self.is_finer:
                same = self.tensor.to(value.dtype) == value
                value = torch.where(same, self.tensor, value.to(self.tensor.dtype))
            self.tensor.copy_(value)
        self.agree()

    def put_back(self) -> None:
        """Gives the parameter a copy's value; where the device has a queue, in it."""
        with torch.no_grad():
            local(self.parameter).copy_(self.tensor, non_blocking=True)
        self.agree()


def changed(copies: list[Held]) -> list[Held]:
    """Returns those whose parameter somebody has changed since it last agreed with its copy.

    Torch counts changes in place, but not those through ``.data``, nor for-each operations on sharded tensors; so
    values are compared too, as a sum over their bits on their device. One wait for the device.
    """
    if not copies:
        return []
    now = torch.stack([_fingerprint(held.parameter) for held in copies])
    then = torch.stack([held.fingerprint for held in copies if held.fingerprint is not None])
    differs = (now != then).tolist()
    return [
        held for held, new in zip(copies, differs, strict=True) if new or held.versions != _versions(held.parameter)
    ]


def _versions(parameter: torch.Tensor) -> tuple[int, ...]:
    own = local(parameter)
    return (
        (parameter._version, own._version, own.data_ptr()) if is_spread(parameter) else (own._version, own.data_ptr())
    )


def _fingerprint(parameter: torch.Tensor) -> torch.Tensor:
    own = local(parameter).detach()
    if own.is_complex():
        own = torch.view_as_real(own)
    return own.view(_AS_INTEGER[own.element_size()]).sum(dtype=torch.int64)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.device != other.device or one.dtype != other.dtype:
        return False
    return one.data_ptr() == other.data_ptr() or one.numel() == 0
