"""Where split layers stand: what ranks hold of activations around them, and how these get in and out.

A column of a layer is computed by one rank, from activations that all ranks have in full; so what is outside is brought
in (`enter`), and what the ranks computed of the same numbers is summed on the way out (`leave`). What they hold outside
is one of three things:

- `gathers=None`: all ranks have the same activations. Entering costs nothing forward and sums gradients backward;
  leaving sums forward (Shoeybi et al. 2019).
- `gathers=1`: each has a share of the sequence, [batch, tokens / degree, ...]. Entering gathers, leaving reduces and
  scatters (Korthikanti et al. 2022).
- `gathers=0`: each has samples of its own, as data-parallel ranks do (`split` beside `replica`). The same along the
  batch.

Gradients. With None and 1 every rank computes the same loss, and what arrives at a split weight is its gradient. With
0 each rank has a loss of its own, of which the engine's is the *mean* over ranks; yet a split weight sees all ranks'
rows, so that what arrives is the *sum*. Nobody averages the gradient of a split weight over data ranks, so the 1 / N is
applied here: to every gradient that goes into the region from behind (backward of `leave`, of `join`, and of the losses
of `SplitLogits`), where it is smallest. What comes out in front, at the input of the region, is multiplied by N
again (backward of `enter`), since that is the gradient of this rank's own loss, which data parallelism averages.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paraflow.errors import DataError
from paraflow.tensor_parallel import crossings
from paraflow.tensor_parallel.traffic import chunk_sizes, exchange_sizes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Region:
    """The ranks that split layers between them, and what they hold of activations outside of these layers.

    One object serves all layers that are split alike: it remembers what was gathered last, so that queries, keys and
    values gather their common input once.

    Args:
        device_mesh: Torch's device mesh over these ranks, of one dimension; None for a region of one rank, in which
            nothing is split and everything below returns what it is given.
        gathers: None where all ranks hold the same activations outside; 0 where each has its own samples, 1 where each
            has a share of the sequence.

    Attributes:
        device_mesh: As given.
        gathers: As given.
        degree: The number of ranks.
        rank: This one's place.
        even: Whether all ranks' shares are known to be of one size; otherwise sizes are told before each gathering.

    Example:
        >>> region = Region(None)
        >>> region.degree, region.range_of(10)
        (1, (0, 10))
        >>> x = torch.ones(2)
        >>> region.leave(region.enter(x)) is x
        True
    """

    def __init__(self, device_mesh: DeviceMesh | None, gathers: int | None = None) -> None:
        if gathers not in (None, 0, 1):
            raise ValueError(f"A region was given gathers={gathers!r}; it is None (copies), 0 (batch) or 1 (sequence).")
        self.device_mesh = device_mesh
        self.gathers = gathers
        self.degree = 1 if device_mesh is None else device_mesh.size()
        self.rank = 0 if device_mesh is None else device_mesh.get_local_rank()
        self.even = False
        self._group = None if device_mesh is None or self.degree == 1 else device_mesh.get_group()
        self._sizes: tuple[int, ...] = ()
        self._entered: tuple[weakref.ref[torch.Tensor], tuple[Any, ...], torch.Tensor] | None = None
        self.replaced: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def __repr__(self) -> str:
        kinds = {None: "copies", 0: "own samples", 1: "shares of the sequence"}
        return f"Region(rank {self.rank} of {self.degree}, {kinds[self.gathers]} outside)"

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        return self  # a copy of a model is split over the same ranks

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the ranks; there is none for one rank."""
        assert self._group is not None, "A region of one rank has no process group."
        return self._group

    @property
    def pools(self) -> bool:
        """Whether what is inside belongs to the samples of all ranks, of which this one has only some outside."""
        return self.gathers == 0 and self.degree > 1

    @property
    def share(self) -> float:
        """What gradients are multiplied by on their way in from behind; see the module."""
        return 1 / self.degree if self.gathers == 0 else 1.0

    def sizes_of(self, size: int) -> tuple[int, ...]:
        """How a size is divided over the ranks, as torch divides it."""
        return chunk_sizes(size, self.degree)

    def range_of(self, size: int) -> tuple[int, int]:
        """This rank's (first, end) of a size."""
        sizes = self.sizes_of(size)
        start = sum(sizes[: self.rank])
        return start, start + sizes[self.rank]

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Brings activations in, in front of a column-split layer.

        Args:
            x: What this rank holds outside: [batch, ...], with `gathers=1` [batch, its tokens, ...].

        Returns:
            What all ranks hold: x itself, or the samples (tokens) of all ranks, in order of rank.

        Raises:
            DataError: Samples of different ranks have different shapes.
        """
        if self.degree == 1:
            return x
        if x.is_inference():  # torch counts no changes of it, so that it may have other values by now
            return self._enter(x)
        state = (x._version, x.requires_grad, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        if self._entered is not None and self._entered[0]() is x and self._entered[1] == state:
            return self._entered[2]
        entered = self._enter(x)
        if not torch.compiler.is_compiling():
            self._entered = (weakref.ref(x, self._let_go), state, entered)
        return entered

    def forget(self) -> None:
        """Lets go of what came in last, which holds the graph that it came from."""
        self._entered = None

    def _let_go(self, gone: weakref.ref[torch.Tensor]) -> None:
        if self._entered is not None and self._entered[0] is gone:
            self._entered = None

    def _enter(self, x: torch.Tensor) -> torch.Tensor:
        if self.gathers is None:
            return crossings.copy(x, self.group)
        self._sizes = self._outer_sizes(x)
        scale = float(self.degree) if self.gathers == 0 else 1.0
        return crossings.gather(x, self.gathers, self._sizes, self.group, scale)

    def _outer_sizes(self, x: torch.Tensor) -> tuple[int, ...]:
        """Every rank's size along the gathered dimension."""
        assert self.gathers is not None
        if self.even:
            return (x.shape[self.gathers],) * self.degree
        rest = (*x.shape[: self.gathers], *x.shape[self.gathers + 1 :])
        mine = hash(rest) % 2**31
        told = exchange_sizes(x.shape[self.gathers] * 2**31 + mine, self.group)
        if any(number % 2**31 != mine for number in told):
            raise DataError(
                f"A split layer joins the inputs of {self.degree} ranks, and this rank's has shape {tuple(x.shape)}, "
                f"which differs from another's in more than dimension {self.gathers}. Pad the batches of all ranks to "
                "one length."
            )
        return tuple(number >> 31 for number in told)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Takes activations out, behind a row-split layer, which computed a summand of them on each rank.

        Args:
            x: This rank's summand, of the shape that is inside.

        Returns:
            The sum: with `gathers` the rows (tokens) that this rank has outside.
        """
        self.forget()
        if self.degree == 1:
            return x
        if self.gathers is None:
            return crossings.sum_up(x, self.group)
        sizes = self.rows(x.shape[0]) if self.gathers == 0 else self.sizes_of(x.shape[1])
        return crossings.reduce_scatter(x, self.gathers, sizes, self.group, self.share)

    def rows(self, total: int) -> tuple[int, ...]:
        """How many of the rows inside are each rank's: as many as came in last, or a multiple of it."""
        known = sum(self._sizes)
        if total == known:
            return self._sizes
        if known == 0 or total % known:
            raise DataError(
                f"{total} rows leave a split region that {known} entered, so they cannot be given back to the ranks. "
                "Within a split, keep the samples in dimension 0, and all of them."
            )
        return tuple(size * (total // known) for size in self._sizes)

    def join(self, x: torch.Tensor, size: int) -> torch.Tensor:
        """Takes a column-split layer's output out: all of its features, on each rank.

        Args:
            x: This rank's features, [..., its part of `size`].
            size: The number of features of the whole.

        Returns:
            [..., size], with `gathers=0` of this rank's own rows; with `gathers=1` the whole sequence.
        """
        self.forget()
        if self.degree == 1:
            return x
        if not self.pools:
            return crossings.collect(x, -1, self.sizes_of(size), self.group)
        rows = self.rows(x.shape[0])
        rest = x.shape[1:-1].numel()
        flat = x.reshape(x.shape[:-1].numel(), x.shape[-1])
        own = crossings.own_rows(flat, tuple(n * rest for n in rows), self.sizes_of(size), self.group, self.share)
        return own.view(rows[self.rank], *x.shape[1:-1], size)

    def split_last(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the last dimension of something that all ranks hold alike, such as a replicated bias.

        Its gradient is joined over the ranks, so that it is whole, and the same on all.
        """
        return x if self.degree == 1 else crossings.scatter(x, -1, self.sizes_of(x.shape[-1]), self.group)

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """A value that all ranks hold alike and use on their parts: its gradient is summed over them."""
        return x if self.degree == 1 else crossings.copy(x, self.group)

    def scatter(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """From a tensor that all ranks hold alike to this rank's share along a dimension; backward joins."""
        return x if self.degree == 1 else crossings.scatter(x, dim, self.sizes_of(x.shape[dim]), self.group)

    def collect(self, x: torch.Tensor, dim: int = 1, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """From shares along a dimension to the whole, on all ranks; backward takes this rank's share.

        It is for what all ranks go on with alike; in front of a split layer stands `enter`.

        Args:
            x: This rank's share.
            dim: The dimension.
            sizes: Every rank's size along it; told if None, unless they are known to be even.
        """
        if self.degree == 1:
            return x
        if sizes is None:
            size = x.shape[dim]
            sizes = (size,) * self.degree if self.even else exchange_sizes(size, self.group)
        return crossings.collect(x, dim, tuple(sizes), self.group)
