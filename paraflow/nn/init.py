"""Linear and embedding layers that start small, as in GPT-2."""

from __future__ import annotations

import math

from torch import nn


class Linear(nn.Linear):
    """A `torch.nn.Linear` whose weight starts as N(0, std) and whose bias starts at zero.

    The start is in `reset_parameters`, so a layer built on the meta device and filled later starts the same way.

    Args:
        inputs: Size of the last dimension of the input.
        outputs: Size of the last dimension of the output.
        bias: Whether to add a bias.
        std: Standard deviation of the initial weight (Radford et al. 2019 use 0.02).
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = True, std: float = 0.02) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        """Draw the weight anew and set the bias to zero."""
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """A `torch.nn.Embedding` whose weight starts as N(0, std).

    Args:
        entries: Number of rows.
        features: Size of a row.
        std: Standard deviation of the initial weight.
    """

    def __init__(self, entries: int, features: int, std: float = 0.02) -> None:
        self.std = std
        super().__init__(entries, features)

    def reset_parameters(self) -> None:
        """Draw the weight anew."""
        nn.init.normal_(self.weight, std=self.std)


def residual_std(layers: int, std: float = 0.02) -> float:
    """The initial standard deviation of a projection that is added to the residual stream.

    `layers` blocks add 2 * layers terms; dividing by the root of their number keeps the sum's variance independent of
    the depth (Radford et al. 2019, section 2.3).

    Example:
        >>> residual_std(layers=8)
        0.005
    """
    return std / math.sqrt(2 * layers)
