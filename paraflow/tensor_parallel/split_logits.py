"""Class scores of which each rank holds those of some classes: they look whole, and are joined where they must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from paraflow.data.batch import children, map_tensors
from paraflow.errors import ModelError
from paraflow.tensor_parallel import crossings
from paraflow.tensor_parallel.region import Region
from paraflow.tensor_parallel.traffic import exchange_sizes, gather_along

Hook = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class OwnRows:
    """Which rows are this rank's, where those of all ranks are held.

    Attributes:
        counts: The rows of each rank, one rank's behind the other's.
        index: Int64 of the logits' shape without classes: which of this rank's rows stands there.
        untouched: Whether that is all rows in their order; alike on all ranks, since it depends on what was called and
            not on values.
        hooks: What is to see the gradients of this rank's rows.
    """

    counts: tuple[int, ...]
    index: torch.Tensor
    untouched: bool
    hooks: list[Hook]


class SplitLogits(torch.Tensor):
    """Logits [..., classes] of which each rank of a region holds some classes.

    Cross-entropy, argmax, max and topk over the classes, and everything that treats all classes alike (dtypes, scaling,
    shapes and indices in front of the classes), work on the parts: no rank ever holds the whole. Anything else joins
    them, differentiably (`whole`); all ranks of the region must then do the same. They cannot be changed in place.

    In a region that pools samples (`gathers=0`) each rank holds its classes for the rows of *all* ranks, and the tensor
    looks like this rank's own rows.

    Attributes:
        local: This rank's classes, a plain tensor: [..., own classes], or [all rows, own classes].
        region: The ranks.
        classes: How many classes all ranks have together.
        own: Which rows are this rank's; None where all ranks have the same rows.
    """

    local: torch.Tensor
    region: Region
    classes: int
    own: OwnRows | None

    @staticmethod
    def __new__(cls, local: torch.Tensor, region: Region, classes: int, own: OwnRows | None = None) -> SplitLogits:
        """See the class for what is given."""
        lead = local.shape[:-1] if own is None else own.index.shape
        made: SplitLogits = torch.Tensor._make_wrapper_subclass(
            cls, (*lead, classes), dtype=local.dtype, device=local.device
        )
        made.local, made.region, made.classes, made.own = local, region, classes, own
        return made

    @classmethod
    def of_copies(cls, local: torch.Tensor, region: Region, classes: int) -> SplitLogits:
        """Logits of rows that all ranks have alike.

        Args:
            local: This rank's classes, [..., its part of `classes`].
            region: The ranks.
            classes: How many classes all ranks have together.

        Example:
            >>> logits = SplitLogits.of_copies(torch.tensor([[0.0, 2.0, 1.0]]), Region(None), 3)
            >>> logits.argmax(-1)
            tensor([1])
            >>> logits
            SplitLogits(shape (1, 3), torch.float32; this rank holds classes 0 to 2)
        """
        return cls(local, region, classes)

    @classmethod
    def of_all_rows(cls, local: torch.Tensor, region: Region, classes: int, lead: tuple[int, ...]) -> SplitLogits:
        """Logits of rows that differ from rank to rank.

        Args:
            local: This rank's classes of all ranks' rows, [all rows, its part of `classes`].
            region: The ranks, which pool their rows.
            classes: How many classes all ranks have together.
            lead: The shape of this rank's logits without the classes.
        """
        counts = region.rows(local.shape[0])
        index = torch.arange(counts[region.rank], device=local.device).view(lead)
        return cls(local, region, classes, OwnRows(counts, index, True, []))

    def whole(self) -> torch.Tensor:
        """The logits of all classes, [..., classes], an ordinary tensor: a collective, which gradients go through."""
        own, region = self.own, self.region
        if own is None:
            return region.join(self.local, self.classes)
        sizes = region.sizes_of(self.classes)
        rows = crossings.own_rows(self.local, own.counts, sizes, region.group, region.share)
        if rows.requires_grad:
            rows.register_hook(lambda gradient: seen_by(own.hooks, gradient))  # type: ignore[no-untyped-call]
        return rows.view(self.shape) if own.untouched else rows[own.index]

    def with_local(self, local: torch.Tensor) -> SplitLogits:
        """The same rows with other values."""
        return SplitLogits(local, self.region, self.classes, self.own)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Keeps the split where it can, and joins otherwise; see the class."""
        from paraflow.tensor_parallel.split_ops import answer

        return answer(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own type forgets the class
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What reaches torch beside its functions: views, as autograd hands them on, and nothing else."""
        if str(func) in ("aten.view.default", "aten.alias.default", "aten.detach.default", "aten.view_as.default"):
            return args[0].with_local(args[0].local)  # how autograd hands on what a function of its own returns
        raise ModelError(
            f"{func} was given split logits where torch cannot ask them to join, as in an autograd function of one's "
            "own. Give it logits.whole()."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's says Any
        first, end = self.region.range_of(self.classes)
        return f"SplitLogits(shape {tuple(self.shape)}, {self.dtype}; this rank holds classes {first} to {end - 1}" + (
            ")" if self.own is None else f" of {sum(self.own.counts)} rows of {self.region.degree} ranks)"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ModelError(f"{self!r} is a part of logits and cannot be pickled; pickle logits.whole(), on all ranks.")


def of_all_rows(logits: SplitLogits, values: torch.Tensor) -> tuple[tuple[int, ...], torch.Tensor, torch.Tensor]:
    """Tells all ranks what this one has for each of its rows, where they hold the rows of all.

    Args:
        logits: [rows, classes], of rows that are this rank's own.
        values: Int64 [rows, n].

    Returns:
        How many rows each rank has; the values of all ranks' rows, [all rows, n]; and this rank's classes of them,
        [all rows, own classes].
    """
    own, group, rank = logits.own, logits.region.group, logits.region.rank
    assert own is not None
    if own.untouched:
        return own.counts, gather_along(values, 0, own.counts, group), logits.local
    counts = exchange_sizes(values.shape[0], group)
    places = own.index.flatten() + sum(own.counts[:rank])
    joined = gather_along(torch.cat((values, places[:, None]), dim=1), 0, counts, group)
    return counts, joined[:, :-1], logits.local.index_select(0, joined[:, -1])


def is_last(logits: SplitLogits, dim: Any) -> bool:
    """Whether a dimension is that of the classes."""
    return isinstance(dim, int) and dim % logits.dim() == logits.dim() - 1


def picked(logits: SplitLogits, index: torch.Tensor) -> torch.Tensor:
    """The scores of some classes of this rank's rows, differentiably: [..., k], from classes int64 [..., k]."""
    region = logits.region
    if region.degree == 1:
        return logits.local.gather(-1, index)
    if logits.own is None:
        return crossings.sum_up(_own_scores(logits, logits.local, index), region.group)
    counts, told, local = of_all_rows(logits, index.reshape(-1, index.shape[-1]))
    scores = _own_scores(logits, local, told)
    return crossings.reduce_scatter(scores, 0, counts, region.group, region.share).view(index.shape)


def _own_scores(logits: SplitLogits, local: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The scores of those of the classes that this rank has, else 0."""
    first, end = logits.region.range_of(logits.classes)
    inside = (index >= first) & (index < end)
    if first == end:
        return local.sum(-1, keepdim=True).expand(index.shape)
    return local.gather(-1, (index - first).where(inside, 0)).masked_fill(~inside, 0)


def seen_by(hooks: list[Hook], gradient: torch.Tensor) -> torch.Tensor:
    """A gradient after every hook that wants to see it, as torch calls them."""
    for hook in hooks:
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def whole(output: Any) -> Any:
    """Returns what a step gave, at any depth, with split logits joined: a collective where there are any.

    Example:
        >>> whole({"logits": torch.zeros(2)})
        {'logits': tensor([0., 0.])}
    """
    return map_tensors(lambda tensor: tensor.whole() if hasattr(tensor, "whole") else tensor, output)


def needs_all_ranks(output: Any) -> bool:
    """Whether what is asked of a step's output is a collective of ranks with samples of their own."""
    if isinstance(output, torch.Tensor):
        return getattr(output, "own", None) is not None
    return any(needs_all_ranks(child) for child in children(output))
