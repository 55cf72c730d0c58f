"""Cross-entropy of logits that are split by classes: no rank makes the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from paraflow.tensor_parallel.region import Region
from paraflow.tensor_parallel.split_logits import Hook, SplitLogits, of_all_rows, seen_by
from paraflow.tensor_parallel.traffic import all_gather, begin_gather


def cross_entropy(
    input: Any,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy` of split logits; see there.

    Sums are float32 for half precision. Targets that are probabilities, and logits whose classes torch would look for
    in dimension 1 of three, are compared with joined logits.
    """
    deprecated = size_average is not None or reduce is not None
    classes_elsewhere = not isinstance(input, SplitLogits) or input.dim() != 2 or target.dim() != 1
    if classes_elsewhere or deprecated or target.is_floating_point() or reduction not in ("none", "mean", "sum"):
        given = input.whole() if isinstance(input, SplitLogits) else input
        return functional.cross_entropy(
            given, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    if isinstance(target, SplitLogits) or target.shape[0] != input.shape[0]:
        raise ValueError(f"Expected input batch_size ({input.shape[0]}) to match target batch_size ({len(target)}).")
    kept = target != ignore_index
    _require_classes(target, kept, input.classes)
    losses = row_losses(input, target, kept, weight, label_smoothing)
    dtype = losses.dtype if torch.is_autocast_enabled(input.device.type) else input.dtype
    if reduction == "none":
        return losses.to(dtype)
    if reduction == "sum":
        return losses.sum().to(dtype)
    count = kept.sum() if weight is None else (weight[target.where(kept, 0)] * kept).sum()
    return (losses.sum() / count).to(dtype)


def row_losses(
    logits: SplitLogits, target: torch.Tensor, kept: torch.Tensor, weight: torch.Tensor | None, smoothing: float
) -> torch.Tensor:
    """The loss of each of this rank's rows.

    Args:
        logits: [rows, classes].
        target: The class of each row, int64 [rows].
        kept: Bool [rows]; the others' losses are 0, and so are their gradients.
        weight: The weight of each class, [classes], or None.
        smoothing: How much of each target is spread over all classes.

    Returns:
        [rows], in float32 for half precision.
    """
    region, local = logits.region, logits.local
    first, end = region.range_of(logits.classes)
    target = target.where(kept, -1)
    own: tuple[int, ...] = ()
    if logits.own is not None:
        own, told, local = of_all_rows(logits, target[:, None])
        target = told[:, 0]
    kept = target >= 0
    counts = kept.to(_precise(local.dtype))
    strength = (1.0 - smoothing) * (counts if weight is None else weight[target.clamp(min=0)] * counts)
    plan = _Rows(
        region,
        logits.classes,
        target - first,
        (target >= first) & (target < end),
        kept,
        strength,
        smoothing / logits.classes,
        None if weight is None else weight[first:end].to(_precise(local.dtype)),
        float(logits.classes) if weight is None else weight.sum().to(_precise(local.dtype)),
        own,
        [] if logits.own is None else logits.own.hooks,
    )
    return _RowLosses.apply(local, plan)  # type: ignore[no-any-return, no-untyped-call]


def _require_classes(target: torch.Tensor, kept: torch.Tensor, classes: int) -> None:
    right = ((target >= 0) & (target < classes)) | ~kept
    if target.device.type != "cpu":
        torch._assert_async(right.all())
    elif not bool(right.all()):
        raise IndexError(f"Target {int(target[~right][0])} is out of bounds: there are {classes} classes.")


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@dataclass(frozen=True)
class _Rows:
    """What the losses of rows are made of besides the logits; tensors are over all rows that are held.

    Attributes:
        region: The ranks.
        classes: How many classes all ranks have together.
        target: The class, counted from this rank's first.
        inside: Whether this rank has it.
        kept: Whether the row counts.
        strength: What the target's own loss is multiplied by.
        spread: What each class's loss is multiplied by besides.
        weight: The weights of this rank's classes, or None.
        total: The sum of all classes' weights.
        own: How many rows are each rank's; empty where all ranks have the same.
        hooks: What is to see the gradients of this rank's losses.
    """

    region: Region
    classes: int
    target: torch.Tensor
    inside: torch.Tensor
    kept: torch.Tensor
    strength: torch.Tensor
    spread: float
    weight: torch.Tensor | None
    total: float | torch.Tensor
    own: tuple[int, ...]
    hooks: list[Hook]

    def at_target(self, scores: torch.Tensor) -> torch.Tensor:
        """This rank's scores of the targets that it has, else 0."""
        if scores.shape[1] == 0:
            return scores.new_zeros(scores.shape[0])
        return scores.gather(1, self.target.where(self.inside, 0)[:, None])[:, 0].where(self.inside, 0)

    def owner(self) -> torch.Tensor:
        """The rank that has each row's target; any, where the row does not count."""
        first, _ = self.region.range_of(self.classes)
        return ((self.target + first) // self.region.sizes_of(self.classes)[0]).clamp(min=0)

    def mine(self, values: torch.Tensor) -> torch.Tensor:
        """This rank's own rows of all."""
        if not self.own:
            return values
        start = sum(self.own[: self.region.rank])
        return values[start : start + self.own[self.region.rank]]

    def begin_of_all(self, gradient: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begins to gather the gradients of all rows' losses, and returns what waits for them."""
        gradient = seen_by(self.hooks, gradient)
        if not self.own:
            return lambda: gradient
        return begin_gather(gradient * self.region.share, 0, self.own, self.region.group)


class _RowLosses(torch.autograd.Function):
    """Row by row: strength · (log Σ exp − score of the target) + spread · Σ weight · (log Σ exp − score).

    Scores are taken below their row's highest, first of this rank's and then of all, as exactly as torch does it.
    """

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, rows: _Rows) -> torch.Tensor:
        scores = local.to(_precise(local.dtype))
        highest = scores.amax(1) if scores.shape[1] else scores.new_full((scores.shape[0],), -torch.inf)
        below = scores - _finite(highest)[:, None]
        stats = [highest, rows.at_target(below)]
        if rows.spread:
            weighted = below if rows.weight is None else below * rows.weight
            share = scores.shape[1] if rows.weight is None else rows.weight.sum()
            stats += [weighted.sum(1), torch.ones_like(highest) * share]
        powers = below.exp_()
        stats.append(powers.sum(1))
        all_ranks = _of_all_ranks(torch.stack(stats), rows.region)
        top = _finite(all_ranks[:, 0].amax(0))
        beside = _finite(all_ranks[:, 0]) - top
        log_sum = (all_ranks[:, -1] * beside.exp()).sum(0).log()
        picked = all_ranks[:, 1].sum(0) + beside.gather(0, rows.owner()[None])[0]
        losses = rows.strength * (log_sum - picked)
        if rows.spread:
            losses += rows.spread * (rows.total * log_sum - (all_ranks[:, 2] + all_ranks[:, 3] * beside).sum(0))
        # Powers take the place of logits, unless they are twice as large.
        ctx.has_powers = powers.dtype == local.dtype
        ctx.save_for_backward(powers if ctx.has_powers else local, highest, top, log_sum)
        ctx.rows, ctx.dtype = rows, local.dtype
        return rows.mine(torch.where(rows.kept, losses, 0.0)).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows: _Rows = ctx.rows
        saved, highest, top, log_sum = ctx.saved_tensors
        of_all = rows.begin_of_all(gradients[0])
        if ctx.has_powers:
            result = saved * (highest - top - log_sum).exp()[:, None]
        else:
            result = (saved.to(top.dtype) - top[:, None]).sub_(log_sum[:, None]).exp_()
        # Not by a product with 0, since the gradient of a mean over no rows at all is not finite.
        gradient = of_all().where(rows.kept, 0.0)
        result.mul_((gradient * (rows.strength + rows.spread * rows.total))[:, None])
        if result.shape[1]:
            at_target = (gradient * rows.strength).where(rows.inside, 0.0)
            result.scatter_add_(1, rows.target.where(rows.inside, 0)[:, None], -at_target[:, None])
        if rows.spread:
            spread = (gradient * rows.spread)[:, None]
            result.sub_(spread if rows.weight is None else spread * rows.weight)
        return result.to(ctx.dtype), None


def _finite(highest: torch.Tensor) -> torch.Tensor:
    """The highest scores, or 0 where there is none, so that nothing is subtracted from -inf."""
    return highest.masked_fill(highest == -torch.inf, 0.0)


def _of_all_ranks(stats: torch.Tensor, region: Region) -> torch.Tensor:
    """Every rank's statistics: [n, rows] becomes [ranks, n, rows]."""
    if region.degree == 1:
        return stats[None]
    joined = stats.new_empty((region.degree, *stats.shape))
    all_gather(joined.flatten(0, 1), stats, region.group)
    return joined
