"""Softmax of split logits, sums over their classes, and the likelihood of targets, without joining them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from paraflow.tensor_parallel import crossings
from paraflow.tensor_parallel.region import Region
from paraflow.tensor_parallel.split_logits import SplitLogits, is_last, picked
from paraflow.tensor_parallel.traffic import gather_along


def log_softmax(
    logits: SplitLogits, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None, **_: Any
) -> Any:
    """The logarithm of the softmax over the classes, split as the logits are."""
    if not is_last(logits, dim):
        return NotImplemented
    return logits.with_local(_log_softmax(logits, dtype).to(dtype or _result_type(logits)))


def softmax(
    logits: SplitLogits, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None, **_: Any
) -> Any:
    """The softmax over the classes, split as the logits are."""
    if not is_last(logits, dim):
        return NotImplemented
    return logits.with_local(_log_softmax(logits, dtype).exp().to(dtype or _result_type(logits)))


def logsumexp(logits: SplitLogits, dim: Any, keepdim: bool = False) -> Any:
    """The logarithm of the summed exponentials of all classes' scores, [...]."""
    last = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if not is_last(logits, last):
        return NotImplemented
    region, own = logits.region, logits.own
    mine = logits.local.logsumexp(-1, keepdim=True)
    if region.degree == 1:
        return mine if keepdim else mine[..., 0]
    each = (1,) * region.degree
    if own is None:
        return crossings.collect(mine, -1, each, region.group).logsumexp(-1, keepdim=keepdim)
    of_ranks = crossings.own_rows(mine, own.counts, each, region.group, region.share)
    return of_ranks[own.index].logsumexp(-1, keepdim=keepdim)


def total(logits: SplitLogits, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """The sum over the classes, [...]."""
    last = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if not is_last(logits, last):
        return NotImplemented
    region, own = logits.region, logits.own
    mine = logits.local.sum(-1, keepdim=True, dtype=dtype)
    if region.degree > 1 and own is None:
        mine = crossings.sum_up(mine, region.group)
    elif own is not None:
        mine = crossings.reduce_scatter(mine, 0, own.counts, region.group, region.share)[own.index]
    return mine if keepdim else mine[..., 0]


def mean(logits: SplitLogits, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """The mean over the classes, [...]."""
    summed = total(logits, dim, keepdim, dtype=dtype)
    return summed if summed is NotImplemented else summed / logits.classes


def nll_loss(
    input: Any,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """`torch.nn.functional.nll_loss` of split log-probabilities; see there."""
    fits = isinstance(input, SplitLogits) and input.dim() == 2 and target.dim() == 1
    if not fits or size_average is not None or reduce is not None or reduction not in ("none", "mean", "sum"):
        given = input.whole() if isinstance(input, SplitLogits) else input
        return functional.nll_loss(given, target, weight, size_average, ignore_index, reduce, reduction)
    kept = target != ignore_index
    classes = target.where(kept, 0)
    weights = kept.to(input.dtype) if weight is None else weight[classes] * kept
    losses = torch.where(kept, -weights * picked(input, classes[:, None])[:, 0], 0.0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / weights.sum()


def _log_softmax(logits: SplitLogits, dtype: torch.dtype | None) -> torch.Tensor:
    """Of what is held of the scores; float32 for half precision."""
    region = logits.region
    local = logits.local if dtype is None else logits.local.to(dtype)
    scores = local.float() if local.dtype in (torch.float16, torch.bfloat16) else local
    below = scores - _highest(scores.detach(), region)
    mine = below.logsumexp(-1, keepdim=True)
    if region.degree == 1:
        return below - mine
    # Each rank goes on with its own classes: what comes back is to be summed over the ranks.
    each = crossings.gather(mine, -1, (1,) * region.degree, region.group)
    return below - each.logsumexp(-1, keepdim=True)


def _highest(scores: torch.Tensor, region: Region) -> torch.Tensor:
    """The highest of all classes, [..., 1]; 0 where there is none."""
    if scores.shape[-1]:
        highest = scores.amax(-1, keepdim=True)
    else:
        highest = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    if region.degree > 1:
        highest = gather_along(highest, -1, (1,) * region.degree, region.group).amax(-1, keepdim=True)
    return highest.masked_fill(highest == -torch.inf, 0.0)


def _result_type(logits: SplitLogits) -> torch.dtype:
    return torch.float32 if torch.is_autocast_enabled(logits.device.type) else logits.dtype
