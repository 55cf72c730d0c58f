"""Rotary position embedding: positions as rotations of the queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paraflow.errors import ModelError


class Rotary(nn.Module):
    """Rotates pairs of features by an angle that grows with the position (Su et al. 2021, "RoFormer").

    The dot product of a rotated query and a rotated key depends on the distance between them alone. Feature `i` is
    paired with feature `i + head_dim / 2`, as in GPT-NeoX and Llama. Angles are computed in float32 whatever the
    input's dtype.

    It has no parameters and no buffers: the table of angles is rebuilt on the input's device when it is missing, too
    short, or elsewhere. So it is right after construction on the meta device, after `.to(...)`, and is never in a
    checkpoint.

    Args:
        head_dim: Features of one head; even.
        base: The base of the geometric series of frequencies.

    Raises:
        ModelError: If `head_dim` is odd or not positive.

    Example:
        >>> Rotary(head_dim=8)(torch.ones(1, 2, 5, 8)).shape
        torch.Size([1, 2, 5, 8])
    """

    def __init__(self, head_dim: int, base: float = 10_000.0) -> None:
        super().__init__()
        if head_dim < 2 or head_dim % 2:
            raise ModelError(
                f"Rotary positions turn pairs of features, so a head needs an even number of them, not {head_dim}; "
                "choose hidden and heads so that hidden / heads is even."
            )
        self.head_dim = head_dim
        self.base = base
        self._table: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Rotate `x`.

        Args:
            x: Queries or keys, [batch, heads, tokens, head_dim].
            positions: The position of each token, int64 [tokens]; 0, 1, 2... if None.

        Returns:
            The rotated `x`, same shape and dtype.
        """
        cos, sin = self._angles(x) if positions is None else self._compute(positions)
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    def extra_repr(self) -> str:
        """Show the sizes in `print(model)`."""
        return f"head_dim={self.head_dim}, base={self.base}"

    def __getstate__(self) -> dict[str, object]:
        # A copy or a pickled module rebuilds the table where it lands.
        return {**self.__dict__, "_table": None}

    def _angles(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.shape[-2]
        # Fake tensors (tracing, profiling) must neither read the real table nor leave a fake one behind.
        if type(x) is not Tensor or torch.compiler.is_compiling():
            return self._compute(torch.arange(tokens, device=x.device))
        if self._table is None or self._table[0].device != x.device or len(self._table[0]) < tokens:
            # A table made in inference mode could not be used for training afterwards.
            with torch.inference_mode(False):
                self._table = self._compute(torch.arange(tokens, device=x.device))
        cos, sin = self._table
        return cos[:tokens], sin[:tokens]

    def _compute(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        pair = torch.arange(0, self.head_dim, 2, device=positions.device, dtype=torch.float32)
        angles = positions.float()[:, None] * self.base ** (-pair / self.head_dim)
        return angles.cos(), angles.sin()
