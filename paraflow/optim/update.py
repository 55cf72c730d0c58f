"""How an optimizer is applied: to the model's parameters themselves, or to tensors that stand in for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from paraflow.parts import local


@dataclass(slots=True)
class Held:
    """What the optimizer holds for one parameter of the model.

    Attributes:
        name: The parameter's name in the bare module.
        parameter: The model's own parameter, as the plugins left it; it may be sharded.
        tensor: What the optimizer holds: the parameter itself, this rank's shard of it, or a copy on the host.
        version: How often the parameter had been changed in place when the tensor last agreed with it.
    """

    name: str
    parameter: nn.Parameter
    tensor: torch.Tensor
    version: int = 0

    @property
    def is_itself(self) -> bool:
        """Whether the optimizer holds the model's own parameter."""
        return self.tensor is self.parameter

    @property
    def is_copy(self) -> bool:
        """Whether the tensor has memory of its own, so that gradients and weights are copied."""
        return self.tensor.data_ptr() != local(self.parameter).data_ptr() and self.tensor.numel() > 0


class Update:
    """Applies an optimizer to a model.

    Args:
        optimizer: The optimizer, over the model's parameters.
        parameters: The model's trained parameters by name.

    Attributes:
        optimizer: The optimizer.
        held: What it holds, in the order of its groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self.optimizer = optimizer
        names = {id(parameter): name for name, parameter in parameters.items()}
        self.held = [
            Held(names[id(parameter)], parameter, parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        self._direct = True

    @property
    def by_tensor(self) -> dict[int, Held]:
        """What is held, by the id of the tensor that the optimizer has."""
        return {id(held.tensor): held for held in self.held}

    def hold(self, make: Callable[[Held], torch.Tensor]) -> None:
        """Gives the optimizer other tensors to hold; state it has already goes with them.

        Args:
            make: Returns what is held from now on, or ``held.tensor`` to leave it.
        """
        found = self.by_tensor
        for group in self.optimizer.param_groups:
            group["params"] = [self._replace(found[id(tensor)], make) for tensor in group["params"]]
        self._direct = all(held.is_itself for held in self.held)

    def _replace(self, held: Held, make: Callable[[Held], torch.Tensor]) -> torch.Tensor:
        before, held.tensor = held.tensor, make(held)
        if held.tensor is not before and before in self.optimizer.state:
            self.optimizer.state[held.tensor] = self.optimizer.state.pop(before)
        held.version = held.parameter._version
        return held.tensor

    def __call__(self) -> None:
        """Makes one step of the optimizer with the gradients that the model's parameters have."""
        if self._direct:
            self.optimizer.step()
            return
        for held in self.held:
            gradient = held.parameter.grad
            held.tensor.grad = None if gradient is None else local(gradient)
        self.optimizer.step()
        for held in self.held:
            if not held.is_itself:
                held.tensor.grad = None
