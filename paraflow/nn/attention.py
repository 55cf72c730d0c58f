"""Multi-head self-attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paraflow.errors import ModelError
from paraflow.nn.init import Linear
from paraflow.nn.rotary import Rotary


class SelfAttention(nn.Module):
    """Multi-head self-attention on torch's fused `scaled_dot_product_attention` (Vaswani et al. 2017).

    Queries, keys and values are separate projections, and the number of heads is read off their outputs, so a tensor
    parallel plan can shard them by head without changing this code.

    Args:
        hidden: Features of a token.
        heads: Query heads; divides `hidden`.
        kv_heads: Key and value heads, a divisor of `heads`; fewer than `heads` is grouped-query attention
            (Ainslie et al. 2023). As many as `heads` if None.
        causal: Whether a token sees only itself and the tokens before it.
        dropout: Probability of dropping an attention weight while training.
        bias: Whether the projections have biases.
        rotary: Rotary positions for queries and keys, or None.
        out_std: Standard deviation of the initial output projection.

    Raises:
        ModelError: If the sizes do not divide each other.

    Example:
        >>> SelfAttention(hidden=32, heads=4, kv_heads=2, causal=True)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        rotary: Rotary | None = None,
        out_std: float = 0.02,
    ) -> None:
        super().__init__()
        check_heads(hidden, heads, kv_heads)
        self.head_dim = hidden // heads
        self.causal = causal
        self.dropout = dropout
        kv_hidden = (kv_heads or heads) * self.head_dim
        self.query = Linear(hidden, hidden, bias)
        self.key = Linear(hidden, kv_hidden, bias)
        self.value = Linear(hidden, kv_hidden, bias)
        self.out = Linear(hidden, hidden, bias, std=out_std)
        self.rotary = rotary

    def forward(self, x: Tensor, padding_mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Mix each token with the tokens that it may see.

        Args:
            x: Tokens, float [batch, tokens, hidden].
            padding_mask: Bool [batch, tokens], True where there is a token and False where there is padding, which no
                token sees. A token that sees nothing at all (causal, behind left padding) gets zeros, not NaN.
            positions: Positions for the rotary embedding, int64 [tokens]; 0, 1, 2... if None.

        Returns:
            Float [batch, tokens, hidden].
        """
        query, key, value = (self._split(part(x)) for part in (self.query, self.key, self.value))
        if self.rotary is not None:
            query, key = self.rotary(query, positions), self.rotary(key, positions)
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=self._mask(padding_mask),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal and padding_mask is None,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def _mask(self, padding_mask: Tensor | None) -> Tensor | None:
        if padding_mask is None:
            return None
        seen = padding_mask.bool()[:, None, None, :]
        if not self.causal:
            return seen
        tokens = padding_mask.shape[1]
        return seen & torch.ones(tokens, tokens, dtype=torch.bool, device=padding_mask.device).tril()


def check_heads(hidden: int, heads: int, kv_heads: int | None) -> None:
    """Refuse head counts that do not divide.

    Raises:
        ModelError: If `heads` does not divide `hidden`, or `kv_heads` does not divide `heads`.
    """
    if heads < 1 or hidden % heads:
        raise ModelError(
            f"hidden={hidden} cannot be divided into heads={heads}; choose a number of heads that divides it."
        )
    if kv_heads is not None and (kv_heads < 1 or heads % kv_heads):
        raise ModelError(
            f"heads={heads} cannot share kv_heads={kv_heads}; choose a number of key-value heads that divides heads."
        )
