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
        target: Classes, whole numbers of the output's shape without classes; or probabilities (or one-hot classes) of
            the output's shape.

    Returns:
        The mean over samples. Where a sample has several targets, a pair of the sum over those that are not -100 and
        their number, so that samples with fewer targets do not weigh more.

    Raises:
        ModelError: Output and target do not belong together.
    """
    # A masked class target would make this a mean over fewer than the samples it is weighted by: torch refuses it.
    if target.dim() == 1 and target.dtype == torch.int64:
        return functional.cross_entropy(output, target, ignore_index=_NEVER)
    if target.shape == output.shape:
        return functional.cross_entropy(output, target.to(output.dtype))
    output, classes = as_classes(output, target)
    if target.dim() == 1 or target.shape[1:] == (1,):
        return functional.cross_entropy(output, classes, ignore_index=_NEVER)
    total = functional.cross_entropy(output, classes, ignore_index=IGNORED, reduction="sum")
    return total, (classes != IGNORED).sum()


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
        return function(matched, target.to(matched.dtype))

    return loss


_ENTRY_BY_ENTRY = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCEWithLogitsLoss, nn.BCELoss)
_OF_FUNCTIONS: tuple[tuple[Any, Callable[[], nn.Module]], ...] = (
    (functional.cross_entropy, nn.CrossEntropyLoss),
    (functional.nll_loss, nn.NLLLoss),
    (functional.mse_loss, nn.MSELoss),
    (functional.l1_loss, nn.L1Loss),
    (functional.smooth_l1_loss, nn.SmoothL1Loss),
    (functional.huber_loss, nn.HuberLoss),
    (functional.binary_cross_entropy, nn.BCELoss),
    (functional.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss),
)


class _Counted:
    """One of torch's classification losses as (sum, total weight of what it is over).

    torch's mean divides by the class weights of the targets that are not ignored, and not by the number of samples.
    """

    def __init__(self, loss: nn.CrossEntropyLoss | nn.NLLLoss) -> None:
        self._loss = loss

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> Any:
        if target.is_floating_point() and isinstance(self._loss, nn.CrossEntropyLoss):
            return self._loss(output, target)
        output, target = as_classes(output, target)
        loss, ignored = self._loss, self._loss.ignore_index
        weights = None if loss.weight is None else loss.weight.to(output.device)
        options: dict[str, Any] = {"weight": weights, "ignore_index": ignored, "reduction": "sum"}
        kept = target != ignored
        count = kept.sum() if weights is None else (weights[target.where(kept, 0)] * kept).sum()
        if isinstance(loss, nn.CrossEntropyLoss):
            total = functional.cross_entropy(output, target, label_smoothing=loss.label_smoothing, **options)
        else:
            total = functional.nll_loss(output, target, **options)
        return total, count


def as_classes(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Brings logits and classes to the shapes and dtype that torch's classification losses take.

    Raises:
        ModelError: The target holds no classes for this output.
    """
    if target.dim() == output.dim() and target.dim() == 2 and target.shape[1] == 1:
        target = target.squeeze(1)
    if target.is_floating_point() or target.dim() != output.dim() - 1:
        raise ModelError(
            f"The output has shape {tuple(output.shape)} and the target {tuple(target.shape)} of {target.dtype}; "
            "cross-entropy takes logits [samples, classes] and classes [samples] as whole numbers (target.long()), or "
            "probabilities of the output's shape as floats."
        )
    target = target.long()
    if output.dim() > 2 and output.shape[:-1] == target.shape:
        return output.flatten(0, -2), target.flatten()
    return output, target


_LOSSES: dict[str, Callable[..., Any]] = {
    "cross_entropy": cross_entropy,
    "bce_with_logits": _binary_cross_entropy_with_logits,
    "mse": _regression(functional.mse_loss),
    "mae": _regression(functional.l1_loss),
    "l1": _regression(functional.l1_loss),
    "smooth_l1": _regression(functional.smooth_l1_loss),
    "huber": _regression(functional.huber_loss),
    "nll": _Counted(nn.NLLLoss()),
    "kl_div": lambda output, target: functional.kl_div(output, target, reduction="batchmean"),
}


def loss_function(loss: str | Callable[..., Any]) -> Callable[..., Any]:
    """Returns the loss of a name, or a function as it is.

    torch's own losses are made safe: those that compare entry by entry are held to equal shapes, since broadcasting
    [samples, 1] against [samples] would compare every sample with every other; those over classes are weighed by what
    their mean is over.

    Raises:
        ModelError: There is no loss of that name, or it is not a mean.

    Example:
        >>> loss_function("mse")(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 0.0]))
        tensor(5.)
    """
    if not isinstance(loss, str):
        made = next((make() for function, make in _OF_FUNCTIONS if function is loss), loss)
        return _made_safe(made)
    name = loss.lower()
    if name not in _LOSSES:
        close = difflib.get_close_matches(name, _LOSSES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ModelError(f"There is no loss named {loss!r}.{hint} The names are: {', '.join(_LOSSES)}.")
    return _LOSSES[name]


def _made_safe(loss: Callable[..., Any]) -> Callable[..., Any]:
    reduction = getattr(loss, "reduction", "mean")
    if isinstance(loss, nn.Module) and reduction not in ("mean", "batchmean"):
        name = type(loss).__name__
        raise ModelError(
            f"{name}(reduction={reduction!r}) is no mean, so micro-batches and ranks could not be weighed. Write "
            f"{name}() with its default, or return (sum, count) from training_step."
        )
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise ModelError(
            f"The loss {type(loss).__name__} has parameters of its own, which would not be trained. Make it a part of "
            "the model, and use it in training_step."
        )
    if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return _Counted(loss)
    return _regression(loss) if isinstance(loss, _ENTRY_BY_ENTRY) else loss


def gives_probabilities(loss: Any) -> bool:
    """Whether a loss is over probabilities of two classes, so that a model's outputs are no logits."""
    return isinstance(loss, nn.BCELoss) or loss is functional.binary_cross_entropy
