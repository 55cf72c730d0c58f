"""Losses by name, and how many items their mean is over."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from paraflow.errors import ModelError

IGNORED = -100
"""The class of a target that is not to be predicted, as in torch and transformers."""

_NEVER = -(2**31)


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> Any:
    """Cross-entropy of logits.

    Args:
        output: Logits, [samples, classes], [samples, classes, ...] as torch has it or [samples, ..., classes] as
            language models have it.
        target: Classes, int64 of the output's shape without classes; or probabilities of the output's shape.

    Returns:
        The mean over samples. Where a sample has several targets, a pair of the sum over those that are not -100 and
        their number, so that samples with fewer targets do not weigh more.
    """
    if target.is_floating_point():
        return functional.cross_entropy(output, target)
    if target.dim() == 1:
        # A masked class target would make this a mean over fewer than the samples it is weighted by: torch refuses it.
        return functional.cross_entropy(output, target, ignore_index=_NEVER)
    if output.shape[:-1] == target.shape:
        output, target = output.flatten(0, -2), target.flatten()
    total = functional.cross_entropy(output, target, ignore_index=IGNORED, reduction="sum")
    return total, (target != IGNORED).sum()


def _binary_cross_entropy_with_logits(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.binary_cross_entropy_with_logits(_like(output, target), target.to(output.dtype))


def _like(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Drops the output's last dimension of one where the target has none: [samples, 1] against [samples]."""
    return output.squeeze(-1) if output.dim() == target.dim() + 1 and output.shape[-1] == 1 else output


def _regression(function: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        matched = _like(output, target)
        if matched.shape != target.shape:
            raise ModelError(
                f"The output has shape {tuple(output.shape)} and the target {tuple(target.shape)}; a regression loss "
                "compares them entry by entry, so give both the same shape."
            )
        return function(matched, target)

    return loss


_LOSSES: dict[str, Callable[..., Any]] = {
    "cross_entropy": cross_entropy,
    "bce_with_logits": _binary_cross_entropy_with_logits,
    "mse": _regression(functional.mse_loss),
    "mae": _regression(functional.l1_loss),
    "l1": _regression(functional.l1_loss),
    "smooth_l1": _regression(functional.smooth_l1_loss),
    "huber": _regression(functional.huber_loss),
    "nll": functional.nll_loss,
    "kl_div": lambda output, target: functional.kl_div(output, target, reduction="batchmean"),
}


_ENTRY_BY_ENTRY = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCEWithLogitsLoss, nn.BCELoss)


def loss_function(loss: str | Callable[..., Any]) -> Callable[..., Any]:
    """Returns the loss of a name, or a function as it is.

    torch's losses that compare entry by entry are held to equal shapes: broadcasting [samples, 1] against [samples]
    would compare every sample with every other.

    Raises:
        ModelError: There is no loss of that name.

    Example:
        >>> loss_function("mse")(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 0.0]))
        tensor(5.)
    """
    if isinstance(loss, _ENTRY_BY_ENTRY):
        return _regression(loss)
    if callable(loss):
        return loss
    name = loss.lower()
    if name not in _LOSSES:
        close = difflib.get_close_matches(name, _LOSSES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ModelError(f"There is no loss named {loss!r}.{hint} The names are: {', '.join(_LOSSES)}.")
    return _LOSSES[name]
