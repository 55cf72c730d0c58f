"""The feed-forward half of a transformer block."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from paraflow.nn.init import Linear


class FeedForward(nn.Module):
    """Two linear layers around a non-linearity, applied to each token alone.

    With `activation="gelu"` it is down(gelu(up(x))); with "swiglu" it is down(silu(gate(x)) * up(x)) (Shazeer 2020).

    Args:
        hidden: Features of a token.
        inner: Features between the layers.
        activation: "gelu" or "swiglu".
        bias: Whether the layers have biases.
        out_std: Standard deviation of the initial down projection.

    Example:
        >>> import torch
        >>> FeedForward(hidden=8, inner=32)(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        *,
        activation: Literal["gelu", "swiglu"] = "gelu",
        bias: bool = True,
        out_std: float = 0.02,
    ) -> None:
        super().__init__()
        self.gate = Linear(hidden, inner, bias) if activation == "swiglu" else None
        self.up = Linear(hidden, inner, bias)
        self.down = Linear(inner, hidden, bias, std=out_std)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token: float [..., hidden] to float [..., hidden]."""
        inner = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        return self.down(inner)  # type: ignore[no-any-return]
