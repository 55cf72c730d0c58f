"""The highest of split logits: argmax, max and topk over the classes, without joining them."""

from __future__ import annotations

from typing import Any

import torch

from paraflow.tensor_parallel.split_logits import SplitLogits, is_last, picked
from paraflow.tensor_parallel.traffic import gather_along


def argmax(logits: SplitLogits, dim: int | None = None, keepdim: bool = False) -> Any:
    """The class of the highest score, the first of equal ones: int64 [...]."""
    if not is_last(logits, dim):
        return NotImplemented
    index = _top(logits, 1, largest=True)[1]
    return index if keepdim else index[..., 0]


def maximum(logits: SplitLogits, dim: Any = None, keepdim: bool = False) -> Any:
    """The highest score and its class, as `torch.max` over a dimension returns them."""
    if not is_last(logits, dim):
        return NotImplemented
    values, index = topk(logits, 1)
    pair = (values, index) if keepdim else (values[..., 0], index[..., 0])
    return torch.return_types.max(pair)


def topk(logits: SplitLogits, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """The k highest (lowest) scores and their classes, as `torch.topk` returns them, in order."""
    if not is_last(logits, dim) or k > logits.classes:
        return NotImplemented
    values, index = _top(logits, k, largest=largest)
    if logits.local.requires_grad and torch.is_grad_enabled():
        values = picked(logits, index)
    return torch.return_types.topk((values, index))


def _top(logits: SplitLogits, k: int, *, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best scores and their classes of this rank's rows, without gradients: [..., k] each."""
    region, local = logits.region, logits.local.detach()
    first, _ = region.range_of(logits.classes)
    mine = min(k, local.shape[-1])
    values, index = _best(local, mine, largest)
    index = index + first
    if region.degree > 1:
        sizes = tuple(min(k, size) for size in region.sizes_of(logits.classes))
        values = gather_along(values, -1, sizes, region.group)
        index = gather_along(index, -1, sizes, region.group)
        values, place = _best(values, k, largest)
        index = index.gather(-1, place)
    if logits.own is not None:
        rows = logits.own.index + sum(logits.own.counts[: region.rank])
        values, index = values[rows], index[rows]
    return values, index


def _best(values: torch.Tensor, k: int, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """As topk; for one the first of equal scores, as argmax has it."""
    if k != 1 or values.shape[-1] == 0:
        best, index = values.topk(k, dim=-1, largest=largest)
        return best, index
    index = (values.argmax if largest else values.argmin)(dim=-1, keepdim=True)
    return values.gather(-1, index), index
