"""The loss of a model that predicts tokens: a mean over the tokens that are to be predicted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paraflow.models.losses import IGNORED


def token_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over the targets that are not -100.

    Where every target is -100 the loss is 0 and its gradients are zeros; torch's own mean would be NaN.

    Args:
        logits: Float [..., vocabulary]; half precision is raised to float32.
        targets: Int64 [...].

    Returns:
        A scalar, in nats per token.

    Example:
        >>> logits = torch.zeros(3, 4)
        >>> token_cross_entropy(logits, torch.tensor([1, -100, 2])).exp()
        tensor(4.)
        >>> token_cross_entropy(logits, torch.full((3,), -100))
        tensor(0.)
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    total = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / count_targets(targets).clamp(min=1)


def count_targets(targets: Tensor) -> Tensor:
    """How many targets are not -100: a 0-dim int64 tensor on the targets' device, so that nothing waits for it."""
    return (targets != IGNORED).sum()


def token_step(loss: Any, logits: Tensor, targets: Tensor) -> dict[str, Any]:
    """What a training step returns.

    Args:
        loss: A mean over the predicted tokens, or a pair (sum, number of items).
        logits: Float [batch, tokens, vocabulary].
        targets: Int64 [batch, tokens].

    Returns:
        The mean `loss`, the number of items that it is a mean over as `weight`, and `output` and `target` for metrics.
    """
    if isinstance(loss, tuple):
        total, count = loss
        loss, weight = total / torch.as_tensor(count).clamp(min=1), count
    else:
        weight = count_targets(targets)
    return {"loss": loss, "weight": weight, "output": logits, "target": targets}
