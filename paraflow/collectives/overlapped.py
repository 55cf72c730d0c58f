"""Gradients that are averaged while backward goes on, where DistributedDataParallel cannot do it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from paraflow.collectives.buckets import buckets_of
from paraflow.errors import ModelError
from paraflow.parts import is_spread, local
from paraflow.waiting import waits_for

_SMALLEST = 2**20
_PARTS = 8
"""Into how many buckets gradients are divided at least: what the last one holds is sent when backward is over."""


def marks_of_use(parameters: Sequence[nn.Parameter], device: torch.device) -> torch.Tensor:
    """Returns which parameters this rank has gradients of: to be added up, so that all know which any rank has.

    It is made on the device, where nothing that is copied from the host is waited for.

    Returns:
        A float32 tensor of shape [parameters]: 1 where there is a gradient, else 0.

    Example:
        >>> marks_of_use([nn.Parameter(torch.ones(2))], torch.device("cpu"))
        tensor([0.])
    """
    marks = torch.ones(len(parameters), device=device)
    for place, parameter in enumerate(parameters):
        if parameter.grad is None:
            marks[place] = 0
    return marks


def take_from_others(
    parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor], marks: torch.Tensor
) -> None:
    """Gives parameters that have no gradient here the one that other ranks have, where any has.

    Args:
        parameters: The parameters.
        gradients: The gradient of each, over all ranks.
        marks: What `marks_of_use` gave, over all ranks.
    """
    lacking = [place for place, parameter in enumerate(parameters) if parameter.grad is None]
    if not lacking:  # a rank that lacks none need not look: on an accelerator that would wait for it
        return
    used = marks.tolist()
    for place in lacking:
        if used[place] > 0:
            parameters[place].grad = gradients[place]


class OverlappedAverage:
    """Averages gradients over a group's ranks, a bucket at a time, as soon as they are whole.

    Gradients are whole when backward has come to a parameter as often as in the first step, in which it is counted and
    agreed on. Of what ranks come to differently often, or not at all, the gradients are averaged when backward is over;
    a parameter that no rank has a gradient of has none afterwards, either.
    Buckets stay the same from step to step, so that a run that is resumed adds up in the same order.

    Args:
        parameters: Those that are trained, in the order of the model; alike on every rank of the group.
        group: The ranks; nothing else uses it, for ranks may come to something else sooner or later than to a bucket.
        bucket_bytes: How much is sent at once, at most.
        dtype: What gradients are rounded to and summed in, where it is not their own.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        bucket_bytes: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._group = group
        backwards = list(reversed(parameters))  # about the order in which gradients come
        shares = [local(parameter) for parameter in backwards]
        most = min(bucket_bytes, max(_SMALLEST, sum(share.nbytes for share in shares) // _PARTS))
        left = iter(backwards)
        self._buckets = [_Bucket([next(left) for _ in bucket], group, dtype) for bucket in buckets_of(shares, most)]
        self._slots = [slot for bucket in self._buckets for slot in bucket.slots]
        self._known = False
        self._waits = False
        self._is_open = False

    @property
    def begun(self) -> int:
        """How many buckets are on their way."""
        return sum(bucket.flat is not None for bucket in self._buckets)

    def begin_step(self, *, waits: bool = False) -> None:
        """Begins a step. What a step that was broken off has not begun is begun, so that all ranks end it alike.

        Args:
            waits: Whether averages begin once all backwards are over, for somebody looks at gradients before. Ranks
                need not say the same.
        """
        if self._is_open and self._known:
            self._begin_rest()
            for bucket in self._buckets:
                bucket.drop()
        self._is_open, self._waits = True, waits
        for bucket in self._buckets:
            bucket.missing = len(bucket.slots)
        for slot in self._slots:
            slot.seen = 0

    @contextmanager
    def in_last_backward(self) -> Iterator[None]:
        """The context of a backward after which the gradients of what it reaches are whole."""
        handles = [
            slot.parameter.register_post_accumulate_grad_hook(partial(self._reached, slot))  # type: ignore[no-untyped-call]
            for slot in self._slots
        ]
        try:
            yield
        finally:  # another run may train these parameters otherwise
            for handle in handles:
                handle.remove()

    def finish_step(self) -> None:
        """Averages what is left, and waits for all."""
        if not self._is_open:
            self.begin_step()
        self._begin_rest()
        with waits_for("the average of gradients over replicas"):
            for bucket in self._buckets:
                bucket.finish()
        if not self._known:
            self._learn()
        self._is_open = False

    def _reached(self, slot: _Slot, parameter: torch.Tensor) -> None:
        slot.seen += 1
        bucket = slot.bucket
        if not bucket.is_known:
            return
        if slot.seen > slot.expected:
            raise ModelError(
                f"Backward came more often to a parameter of shape {tuple(parameter.shape)} than in the first step, "
                "where its gradient was whole before. Run the same layers equally often in every step; or write "
                "use_reentrant=False where they are checkpointed, so that backward comes to them once however often "
                "they run."
            )
        if slot.seen == slot.expected:
            bucket.missing -= 1
            if not bucket.missing and not self._waits:
                self._begin_whole()

    def _begin_whole(self) -> None:
        """Begins what is whole, in an order that is the same on all ranks."""
        for bucket in self._buckets:
            if not bucket.is_known or bucket.flat is not None:
                continue
            if bucket.missing:
                return
            bucket.begin()

    def _begin_rest(self) -> None:
        for bucket in sorted(self._buckets, key=lambda bucket: not bucket.is_known):
            if bucket.flat is None:
                bucket.begin()

    def _learn(self) -> None:
        """Learns from a step which gradients are known to become whole in backward: those of which all ranks say so."""
        counts = torch.tensor([slot.seen for slot in self._slots], dtype=torch.int64)
        ends = torch.stack((counts, -counts)).to(local(self._slots[0].parameter).device)
        dist.all_reduce(ends, dist.ReduceOp.MAX, self._group)
        most, least = ends[0].tolist(), (-ends[1]).tolist()
        for slot, high, low in zip(self._slots, most, least, strict=True):
            slot.expected = high if high == low else 0
        for bucket in self._buckets:
            bucket.is_known = all(slot.expected for slot in bucket.slots)
        self._known = True


class _Slot:
    """A parameter's place in a bucket.

    Attributes:
        parameter: The parameter.
        bucket: The bucket.
        seen: How often this step's last backwards have come to it.
        expected: How often they do so in every step, on all ranks; 0 where that is not known.
        had: Whether this rank had a gradient when the average was begun.
    """

    __slots__ = ("_hands_over", "bucket", "expected", "had", "parameter", "seen")

    def __init__(self, parameter: nn.Parameter, bucket: _Bucket) -> None:
        self.parameter, self.bucket = parameter, bucket
        self.seen = self.expected = 0
        self.had = False
        # An optimizer expects that a gradient lies in memory as its parameter does.
        self._hands_over = bucket.dtype is None and not is_spread(parameter) and parameter.is_contiguous()

    def put(self, part: torch.Tensor, ranks: int) -> None:
        """Puts this rank's summand of the mean into the bucket; another rank may have used what this one has not."""
        parameter, dtype = self.parameter, self.bucket.dtype
        self.had = parameter.grad is not None
        if parameter.grad is None:
            part.zero_()
        elif dtype is None:
            torch.div(local(parameter.grad), ranks, out=part)
        else:
            part.copy_(local(parameter.grad)).div_(ranks)
        if self._hands_over:
            parameter.grad = part  # which lets go of the memory of what this rank computed

    def take(self, part: torch.Tensor, used: bool) -> None:
        """Takes the mean out of the bucket, unless no rank has used the parameter."""
        if not used:
            self.parameter.grad = None
            return
        if not self._hands_over:
            if self.parameter.grad is None:
                self.parameter.grad = torch.zeros_like(self.parameter)
            local(self.parameter.grad).copy_(part)


class _Bucket:
    """Some parameters, whose gradients are averaged at once.

    Attributes:
        slots: The places of the parameters.
        is_known: Whether it is known when their gradients are whole, so that the average may begin in backward.
        missing: How many are not whole yet.
        flat: Their gradients, one behind the other, once the average is begun.
        dtype: What they are rounded to, if at all.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self.slots = [_Slot(parameter, self) for parameter in parameters]
        self.is_known, self.missing = False, 0
        self.flat: torch.Tensor | None = None
        shares = [local(parameter) for parameter in parameters]
        self._shapes = [share.shape for share in shares]
        self._sizes = [share.numel() for share in shares]
        self._like = self._users = shares[0].new_empty(0, dtype=dtype)
        self._group, self._ranks = group, dist.get_world_size(group)
        self._parts: list[torch.Tensor] = []
        self._work: dist.Work | None = None

    def begin(self) -> None:
        """Begins the average."""
        with torch.no_grad():
            self.flat = self._like.new_empty(sum(self._sizes) + len(self.slots))
            *pieces, self._users = torch.split(self.flat, [*self._sizes, len(self.slots)])
            self._parts = [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]
            self._users.fill_(1)
            for place, (slot, part) in enumerate(zip(self.slots, self._parts, strict=True)):
                slot.put(part, self._ranks)
                if not slot.had:
                    self._users[place] = 0
        self._work = dist.all_reduce(self.flat, group=self._group, async_op=True)

    def finish(self) -> None:
        """Waits for the average, and gives each parameter its part."""
        assert self._work is not None, "The average was begun."
        self._work.wait()
        # A rank that has a gradient need not look at who else has: on an accelerator that would wait for it.
        looks = not all(slot.had for slot in self.slots)
        used = [users != 0 for users in self._users.tolist()] if looks else [True] * len(self.slots)
        with torch.no_grad():
            for slot, part, is_used in zip(self.slots, self._parts, used, strict=True):
                slot.take(part, is_used)
        self._let_go()

    def drop(self) -> None:
        """Waits for the average, and leaves gradients as this rank has them."""
        assert self._work is not None, "The average was begun."
        self._work.wait()
        for slot in self.slots:
            if not slot.had:
                slot.parameter.grad = None
        self._let_go()

    def _let_go(self) -> None:
        self.flat, self._parts, self._users, self._work = None, [], self._like, None
