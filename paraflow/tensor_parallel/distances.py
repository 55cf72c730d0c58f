"""How far tensors are apart, and how far rounding takes them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_MOST = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 8e-3, torch.bfloat16: 3e-2}
"""How far two outputs may be apart, as a share of their size, by what rounding makes of sums in another order."""
_TF32 = 4e-3


def floor_of(most: float) -> float:
    """From which share of what stands beside it something small is compared as if it were as large.

    A gradient may be nothing but rounding: that of the bias of an attention's keys is 0. In half precision such a one
    is 3e-3 of the largest.

    Args:
        most: What `rounding_of` gave.
    """
    return 0.1 if most < _TF32 else 1.0


def distance_in_all(
    ours: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor],
    floor: float = 1.0,
    inputs: Sequence[torch.Tensor] = (),
) -> float:
    """How far tensors are apart together, as a share of their size, or of what was added to an input.

    Args:
        ours: The tensors.
        others: What they should be.
        floor: The least that is taken for the size of what was added, as a share of the others.
        inputs: What the others may have been added to, of the same shape.

    Example:
        >>> x = torch.full((4,), 10.0)
        >>> round(distance_in_all([x + 2], [x + 3]), 3), round(distance_in_all([x + 2], [x + 3], 0.1, [x]), 3)
        (0.077, 0.333)
    """
    apart = _size([_double(a) - _double(b) for a, b in zip(ours, others, strict=True)])
    size = _size([_double(b) for b in others])
    added = min((_size([_double(b) - _double(x)]) for b in others for x in inputs), default=size)
    return 0.0 if apart == 0 else apart / max(min(size, added), floor * size, 1e-30)


def distance_in_each(ours: Sequence[torch.Tensor], others: Sequence[torch.Tensor], floor: float) -> float:
    """How far tensors are apart, each as a share of its own size.

    Args:
        ours: The tensors.
        others: What they should be.
        floor: The least that is taken for a size, as a share of the largest.

    Example:
        >>> ours, others = [torch.ones(1), torch.full((1,), 0.1)], [torch.ones(1), torch.full((1,), 0.2)]
        >>> round(distance_in_each(ours, others, 0.1), 3)
        0.5
    """
    least = floor * max((_size([_double(b)]) for b in others), default=0.0)
    sizes = [
        (_size([_double(a) - _double(b)]), max(_size([_double(b)]), least)) for a, b in zip(ours, others, strict=True)
    ]
    return max((0.0 if apart == 0 else apart / max(size, 1e-30) for apart, size in sizes), default=0.0)


def _size(tensors: Sequence[torch.Tensor]) -> float:
    return math.sqrt(sum(tensor.square().sum().item() for tensor in tensors))


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(tensor.detach().double())


def rounding_of(dtype: torch.dtype) -> float:
    """How far outputs of a dtype may be apart, by what rounding makes of sums in another order."""
    lowest = [_MOST.get(dtype, 0.1)]
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            lowest.append(_MOST.get(torch.get_autocast_dtype(device), 0.1))
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        lowest.append(_TF32)
    return max(lowest)
