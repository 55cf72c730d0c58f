"""Where the values of a model come from that was built without memory, on torch's meta device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

Birth = Callable[[], torch.Tensor]
"""Returns the whole value of a parameter or buffer, on the host."""


def births_of(module: nn.Module) -> Mapping[str, Birth]:
    """Returns where the values come from of the parameters and buffers that have none yet, by name."""
    return {}


def place(module: nn.Module, births: Mapping[str, Birth], device: torch.device) -> None:
    """Brings a module to a device, and gives values to what has none."""
    module.to(device)
