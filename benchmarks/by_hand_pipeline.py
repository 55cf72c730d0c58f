"""transformers' BERT in plain torch, by hand: data-parallel, and as a pipeline of stages, each with replicas.

Both make the step that one process would make on the whole batch: its loss is the mean over all masked tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

LEARNING_RATE = 1e-3
IGNORED = -100
_BUCKET_BYTES = 8 << 20

Batch = dict[str, Tensor]
"""``input_ids`` and ``labels``, both [rows, tokens] of int64; labels are -100 where nothing is predicted."""


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.01, fused=True)


def _counted(labels: Tensor, group: Any = None) -> tuple[Tensor, dist.Work]:
    """The tokens that the ranks of a group predict; their number is there when the work is done."""
    count = (labels != IGNORED).sum()
    return count, dist.all_reduce(count, group=group, async_op=True)


def _sum_of_losses(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


class DataParallelByHand:
    """Each rank holds the whole model, and gradients are averaged while backward runs.

    Args:
        model: A BertForMaskedLM.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self._optimizer = adamw(model.parameters())

    def step(self, rows: Batch) -> Tensor:
        """Trains on this rank's rows, and returns its part of the mean loss: the sum over ranks is the whole."""
        self._optimizer.zero_grad()
        count, counting = _counted(rows["labels"])
        logits = self._replica(input_ids=rows["input_ids"]).logits
        counting.wait()
        loss = _sum_of_losses(logits, rows["labels"]) / count
        (loss * dist.get_world_size()).backward()  # the replica averages what is to be summed
        self._optimizer.step()
        return loss.detach()

    def step_alone(self, rows: Batch) -> Tensor:
        """The same work of this rank, and no gradient is exchanged."""
        with self._replica.no_sync():
            return self.step(rows)


class PipelineByHand:
    """Each rank holds one stage's layers; ranks of one stage are replicas of each other. 1F1B, as PipeDream-Flush.

    Ranks count stages first: with 2 stages on 4 ranks, ranks 0 and 1 hold the first. What is to be received is asked
    for when the step begins, so that it comes in while others compute. Gradients are summed over replicas, a bucket at
    a time, while the last micro-batch's backward runs; those of the tied embedding over the stages as well.

    Args:
        model: A BertForMaskedLM, the same on all ranks; this rank's stage keeps its modules.
        stages: Stages.
        micro_batches: Micro-batches of a step.
    """

    def __init__(self, model: Any, stages: int, micro_batches: int) -> None:
        self.micro_batches, self._stages = micro_batches, stages
        self._replicas = dist.get_world_size() // stages
        self.stage = dist.get_rank() // self._replicas
        groups = [
            dist.new_group(list(range(stage * self._replicas, (stage + 1) * self._replicas))) for stage in range(stages)
        ]
        self._group = groups[self.stage]
        self._first, self._last = self.stage == 0, self.stage == stages - 1
        layers = model.bert.encoder.layer
        here = slice(self.stage * len(layers) // stages, (self.stage + 1) * len(layers) // stages)
        self.modules = nn.ModuleDict({"layers": nn.ModuleList(layers[here])})
        if self._first:
            self.modules["embeddings"] = model.bert.embeddings
        if self._last:
            self.modules["head"] = model.cls
        self._width = model.config.hidden_size
        tied = [model.bert.embeddings.word_embeddings.weight]
        own = [weight for weight in self.modules.parameters() if weight is not tied[0]]
        self._buckets = [_Bucket(weights, self._group) for weights in _divided(own)]
        if self._first or self._last:
            self._buckets.append(_Bucket(tied, _ends(stages, self._replicas)))
        self._optimizer = adamw(self.modules.parameters())

    @property
    def replica(self) -> int:
        """Which replica of its stage this rank is: which rows of a batch are its own."""
        return dist.get_rank() % self._replicas

    def step(self, rows: Batch) -> Tensor | None:
        """Trains on this replica's rows; the last stage returns its part of the mean loss, others None."""
        for bucket in self._buckets:
            bucket.gradients.zero_()
        ids, self._labels = (rows[name].chunk(self.micro_batches) for name in ("input_ids", "labels"))
        if self._last:
            self._count, self._counting = _counted(rows["labels"], self._group)
        self._sends: list[dist.Work] = []
        self._kept: list[tuple[Tensor | None, Tensor]] = []
        before, after = dist.get_rank() - self._replicas, dist.get_rank() + self._replicas
        self._inputs = [] if self._first else [self._receive(part, before, place) for place, part in enumerate(ids)]
        self._gradients = [] if self._last else [self._receive(part, after, place) for place, part in enumerate(ids)]
        warm_up = min(self._stages - 1 - self.stage, self.micro_batches)
        losses = [self._forward(ids, place, after) for place in range(warm_up)]
        for place in range(warm_up, self.micro_batches):
            losses.append(self._forward(ids, place, after))
            self._backward(place - warm_up, before)
        for place in range(self.micro_batches - warm_up, self.micro_batches):
            self._backward(place, before)
        for bucket in self._buckets:
            bucket.wait()
        self._optimizer.step()
        for sent in self._sends:
            sent.wait()
        return torch.stack(losses).sum() if self._last else None

    def _receive(self, ids: Tensor, peer: int, place: int) -> tuple[Tensor, dist.Work | None]:
        buffer = torch.empty(*ids.shape, self._width)
        return buffer, dist.irecv(buffer, peer, tag=place)

    def _send(self, tensor: Tensor, peer: int, place: int) -> None:
        sent = dist.isend(tensor.contiguous(), peer, tag=place)
        if sent is not None:
            self._sends.append(sent)

    def _forward(self, ids: Sequence[Tensor], place: int, after: int) -> Tensor:
        """Runs a micro-batch forward; returns its part of the loss where this is the last stage."""
        received: Tensor | None = None
        if self._first:
            hidden = self.modules["embeddings"](input_ids=ids[place])
        else:
            received = hidden = _arrived(self._inputs[place]).requires_grad_()
        for layer in self.modules["layers"]:
            hidden = layer(hidden)
        if not self._last:
            self._send(hidden.detach(), after, place)
            self._kept.append((received, hidden))
            return hidden
        if not place:
            self._counting.wait()
        loss = _sum_of_losses(self.modules["head"](hidden), self._labels[place]) / self._count
        self._kept.append((received, loss))
        return loss.detach()

    def _backward(self, place: int, before: int) -> None:
        if place == self.micro_batches - 1:
            for bucket in self._buckets:
                bucket.expect()
        received, output = self._kept[place]
        gradient = None if self._last else _arrived(self._gradients[place])
        output.backward(gradient)  # type: ignore[no-untyped-call]
        if received is not None and received.grad is not None:
            self._send(received.grad, before, place)
        self._kept[place] = (None, gradient if gradient is not None else output.detach())  # the graph goes


def _arrived(waited_for: tuple[Tensor, dist.Work | None]) -> Tensor:
    buffer, work = waited_for
    if work is not None:
        work.wait()
    return buffer


class _Bucket:
    """Gradients of some parameters, one behind the other, summed over a group once all of them are there."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: Any) -> None:
        self.gradients = torch.zeros(sum(parameter.numel() for parameter in parameters))
        self._group, self._number, self._missing = group, len(parameters), 0
        self._work: dist.Work | None = None
        places = self.gradients.split([parameter.numel() for parameter in parameters])  # type: ignore[no-untyped-call]
        for parameter, place in zip(parameters, places, strict=True):
            parameter.grad = place.view_as(parameter)
            parameter.register_post_accumulate_grad_hook(self._ready)

    def expect(self) -> None:
        """The backward that begins is the last."""
        self._missing = self._number

    def _ready(self, _: Tensor) -> None:
        if self._missing:
            self._missing -= 1
            if not self._missing:
                self._work = dist.all_reduce(self.gradients, group=self._group, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()


def _divided(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters in buckets, the last first, since backward comes to them in this order."""
    buckets: list[list[nn.Parameter]] = [[]]
    held = 0
    for parameter in reversed(parameters):
        if held > _BUCKET_BYTES:
            buckets.append([])
            held = 0
        buckets[-1].append(parameter)
        held += 4 * parameter.numel()
    return buckets


def _ends(stages: int, replicas: int) -> Any:
    """The ranks of the first and the last stage; only they call this, so only they make the group."""
    ranks = sorted({*range(replicas), *range((stages - 1) * replicas, stages * replicas)})
    return dist.new_group(ranks, use_local_synchronization=True)
