"""A pre-norm transformer block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

NormName = Literal["layer", "rms"]


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)).

    Normalising before each half rather than after the sum keeps gradients even over depth, so that it trains without a
    long warmup (Xiong et al. 2020).

    Args:
        hidden: Features of a token.
        attention: Module called with (x, padding_mask, positions); see `SelfAttention`.
        feed_forward: Module called with (x).
        norm: "layer" for LayerNorm, "rms" for RMSNorm (Zhang and Sennrich 2019), or a function of the number of
            features.
        dropout: Probability of dropping a feature of either half's output while training.

    Example:
        >>> import torch
        >>> from paraflow.nn import FeedForward, SelfAttention
        >>> block = TransformerBlock(8, SelfAttention(8, heads=2), FeedForward(8, 32))
        >>> block(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        hidden: int,
        attention: nn.Module,
        feed_forward: nn.Module,
        *,
        norm: NormName | Callable[[int], nn.Module] = "layer",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention_norm = make_norm(norm, hidden)
        self.attention = attention
        self.feed_forward_norm = make_norm(norm, hidden)
        self.feed_forward = feed_forward
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Transform tokens: float [batch, tokens, hidden] to the same; masks and positions as in `SelfAttention`."""
        x = x + self.dropout(self.attention(self.attention_norm(x), padding_mask, positions))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))  # type: ignore[no-any-return]


def make_norm(norm: NormName | Callable[[int], nn.Module], hidden: int) -> nn.Module:
    """The normalisation called `norm`, over `hidden` features."""
    if norm == "layer":
        return nn.LayerNorm(hidden)
    if norm == "rms":
        return nn.RMSNorm(hidden, eps=1e-6)
    return norm(hidden)
