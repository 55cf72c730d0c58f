"""Runs a step of a pipeline on one rank: its stages' forwards and backwards in a schedule's order, and the messages.

What a stage computes is the business of a `Work`; what crosses between stages that of a `Traffic`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from paraflow.errors import ModelError
from paraflow.mesh import Mesh
from paraflow.pipelining.exchange import Crossing, Exchange, Message, Traffic
from paraflow.pipelining.halves import SplitBackward
from paraflow.pipelining.orders import Action, Kind, Schedule, receive_early
from paraflow.plugins.base import Part


@dataclass(frozen=True, slots=True)
class Turn:
    """A forward or a backward, and its place among those that this rank runs in the step.

    Attributes:
        action: What is run.
        part: "forward" or "backward". A backward in two halves (zero bubble) has two turns.
        ordinal: Its number among this rank's turns of this part, from 0.
        count: How many turns of this part this rank runs in the step.
        ends_stage: Whether it is the last turn of this part on its stage: after the last backward of a stage, its
            gradients are whole.
    """

    action: Action
    part: Part
    ordinal: int
    count: int
    ends_stage: bool


class Work(Protocol):
    """What the stages of a pipeline compute."""

    def forward(self, stage: int, index: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Runs forward of a stage.

        Args:
            stage: The stage.
            index: The micro-batch.
            received: What the stage before sent, as the traffic says; empty on the first stage. They are this stage's
                own, and may be changed in place. Those that carry gradients require them, where gradients are on.

        Returns:
            What goes on to the next stage, in the order of the traffic. The last stage returns what backward starts
            from, as ``(loss,)``; what it returns without gradients is not looked at.
        """

    def around(self, turn: Turn) -> AbstractContextManager[Any]:
        """Returns the context of a forward or a backward in a training step, such as ``engine.around``."""

    def before_backward(self, stage: int, index: int) -> None:
        """Called in the context, before the backward of a stage begins: its first half, where it has two."""

    def after_backward(self, stage: int, index: int) -> None:
        """Called in the context, when what a micro-batch adds to the gradients of a stage's parameters is there."""


class Executor:
    """Runs one rank's part of a pipeline.

    Args:
        mesh: The ranks; places of the schedule lie along "pp".
        schedule: The order in which stages run.
    """

    def __init__(self, mesh: Mesh, schedule: Schedule) -> None:
        self._mesh, self._schedule = mesh, schedule
        self._place = mesh.coordinate("pp")
        # NCCL runs messages in the order in which they are begun, which must then be one order on both sides.
        self._early = 2 if mesh.device.type == "cpu" else 0

    def run(self, work: Work, traffic: Sequence[Traffic]) -> None:
        """Runs forward and backward of a step's micro-batches, of which there may be any number.

        Args:
            work: What the stages compute.
            traffic: What crosses, for each micro-batch; the same on every rank.

        Raises:
            ModelError: A stage returned something else than the traffic says. Nothing was sent of it.
        """
        order = receive_early(self._schedule.order(len(traffic))[self._place], self._early)
        run = _Run(work, traffic, self._schedule, self._place, Exchange(self._mesh))
        for action, turn in zip(order, _turns(order), strict=True):
            if turn is None:
                run.communicate(action)
            else:
                with work.around(turn):
                    run.compute(action)
        run.exchange.finish()

    def forward_only(self, work: Work, traffic: Sequence[Traffic]) -> None:
        """Runs forward of any number of micro-batches: for `evaluate` and `predict`.

        The caller turns off gradients. `Work.around` is not called.

        Args:
            work: What the stages compute.
            traffic: What crosses, for each micro-batch; the same on every rank.

        Raises:
            ModelError: As for `run`.
        """
        run = _Run(work, traffic, self._schedule, self._place, Exchange(self._mesh))
        for action in receive_early(self._schedule.forward_order(len(traffic))[self._place], self._early):
            (run.compute if action.kind is Kind.FORWARD else run.communicate)(action)
        run.exchange.finish()


def _turns(order: Sequence[Action]) -> Iterator[Turn | None]:
    """The turn that each action is; None for messages."""
    parts = [_PARTS.get(action.kind) for action in order]
    left = Counter((part, action.stage) for part, action in zip(parts, order, strict=True))
    totals, begun = Counter(parts), Counter[Part | None]()
    for part, action in zip(parts, order, strict=True):
        left[part, action.stage] -= 1
        if part is None:
            yield None
        else:
            yield Turn(action, part, begun[part], totals[part], ends_stage=left[part, action.stage] == 0)
            begun[part] += 1


_PARTS: dict[Kind, Part] = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward",
    Kind.BACKWARD_WEIGHT: "backward",
}


@dataclass(slots=True)
class _Kept:
    """What is kept of a forward until its backward.

    Attributes:
        leaves: What was received and is given gradients.
        roots: Where backward begins, with the place of its gradient among those that come back.
        gradients: Those that have come back.
        split: A backward of which the second half is to be run.
    """

    leaves: tuple[Tensor, ...]
    roots: list[tuple[int, GradientEdge]]
    gradients: tuple[Tensor, ...] = ()
    split: SplitBackward | None = None


@dataclass(slots=True)
class _Run:
    """One step on one rank: what has arrived, what is kept, what is to be sent, by (stage, micro-batch)."""

    work: Work
    traffic: Sequence[Traffic]
    schedule: Schedule
    place: int
    exchange: Exchange
    arrived: dict[Action, Message] = field(default_factory=dict)
    outgoing: dict[Action, tuple[Tensor, ...]] = field(default_factory=dict)
    kept: dict[tuple[int, int], _Kept] = field(default_factory=dict)

    def compute(self, action: Action) -> None:
        """Runs a forward or a backward."""
        run: dict[Kind, Callable[[int, int], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
        }
        run[action.kind](action.stage, action.index)

    def communicate(self, action: Action) -> None:
        """Begins to send or to receive."""
        forward = action.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
        comes_later = action.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD)
        peer = self.schedule.places[action.stage + (1 if comes_later else -1)]
        boundary = action.stage if comes_later else action.stage - 1
        what = f"{'values' if forward else 'gradients'} between stages {boundary} and {boundary + 1}"
        what = f"{what}, micro-batch {action.index}"
        crossing = self._crossing(boundary, action.index)
        expected = crossing if forward else [one for one in crossing if one.requires_grad]
        if action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            self.exchange.send(self.outgoing.pop(action), expected, peer, what)
            return
        self.arrived[action] = self.exchange.receive(expected, peer, what)

    def _crossing(self, boundary: int, index: int) -> Sequence[Crossing]:
        """What crosses from a stage to the next; nothing does before the first and after the last."""
        inside = 0 <= boundary < self.schedule.stages - 1
        return self.traffic[index].crossing[boundary] if inside else ()

    def _forward(self, stage: int, index: int) -> None:
        message = self.arrived.pop(Action(Kind.RECEIVE_FORWARD, stage, index), None)
        arrived = () if message is None else message.wait()
        del message
        leaves, received = _entered(arrived, self._crossing(stage - 1, index))
        produced = self.work.forward(stage, index, received)
        del arrived, received
        if stage < self.schedule.stages - 1:
            crossing = self._crossing(stage, index)
            _require_as_traced(produced, crossing, stage, index)
            self._pass_on(Action(Kind.SEND_FORWARD, stage, index), _settled(produced, crossing), stage + 1)
            produced = tuple(one for one, said in zip(produced, crossing, strict=True) if said.requires_grad)
        if torch.is_grad_enabled():
            roots = [(place, get_gradient_edge(one)) for place, one in enumerate(produced) if one.requires_grad]
            ones = tuple(map(torch.ones_like, produced)) if stage == self.schedule.stages - 1 else ()
            self.kept[stage, index] = _Kept(leaves, roots, ones)

    def _pass_on(self, send: Action, tensors: tuple[Tensor, ...], stage: int) -> None:
        """Leaves tensors to be sent, or hands them to another stage of this rank."""
        if self.schedule.places[stage] != self.place:
            self.outgoing[send] = tensors
            return
        forward = send.kind is Kind.SEND_FORWARD
        receive = Action(Kind.RECEIVE_FORWARD if forward else Kind.RECEIVE_BACKWARD, stage, send.index)
        # The next stage may change what it is given in place; backward of this one needs it as it is.
        copies = tuple(tensor.clone() for tensor in tensors) if forward else tensors
        self.arrived[receive] = Message(copies, "", [])

    def _take_gradients(self, stage: int, index: int) -> _Kept:
        kept = self.kept[stage, index]
        message = self.arrived.pop(Action(Kind.RECEIVE_BACKWARD, stage, index), None)
        if message is not None:
            kept.gradients = message.wait()
        return kept

    def _backward(self, stage: int, index: int) -> None:
        kept = self._take_gradients(stage, index)
        del self.kept[stage, index]
        self.work.before_backward(stage, index)
        _backward(kept)
        self._return_gradients(kept, stage, index)
        self.work.after_backward(stage, index)

    def _backward_input(self, stage: int, index: int) -> None:
        """The half that the stage before waits for; where none waits, all is left to the other half."""
        kept = self._take_gradients(stage, index)
        self.work.before_backward(stage, index)
        if kept.leaves and kept.roots:
            kept.split = SplitBackward([edge for _, edge in kept.roots], kept.leaves)
            kept.split.of_inputs([kept.gradients[place] for place, _ in kept.roots])
        self._return_gradients(kept, stage, index)
        if kept.split is not None:
            kept.leaves, kept.roots, kept.gradients = (), [], ()

    def _backward_weight(self, stage: int, index: int) -> None:
        kept = self.kept.pop((stage, index))
        if kept.split is None:
            _backward(kept)
        else:
            kept.split.of_weights()
        self.work.after_backward(stage, index)

    def _return_gradients(self, kept: _Kept, stage: int, index: int) -> None:
        if stage > 0:
            gradients = tuple(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in kept.leaves)
            self._pass_on(Action(Kind.SEND_BACKWARD, stage, index), gradients, stage - 1)


def _backward(kept: _Kept) -> None:
    roots = [edge for _, edge in kept.roots]
    gradients = [kept.gradients[place] for place, _ in kept.roots]
    if roots:
        torch.autograd.backward(roots, gradients)


def _entered(arrived: Sequence[Tensor], crossing: Sequence[Crossing]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Returns the leaves that are given gradients, and what a stage is given: leaves cannot be changed in place."""
    if not torch.is_grad_enabled():
        return (), tuple(arrived)
    leaves, received = [], []
    for tensor, said in zip(arrived, crossing, strict=True):
        if said.requires_grad:
            leaves.append(tensor.requires_grad_())
            tensor = _Entry.apply(tensor)  # type: ignore[no-untyped-call]
        received.append(tensor)
    return tuple(leaves), tuple(received)


class _Entry(torch.autograd.Function):
    """The same values in a tensor that is no leaf, and no view of one."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _settled(produced: Sequence[Tensor], crossing: Sequence[Crossing]) -> tuple[Tensor, ...]:
    """What is sent: of what has no gradient a copy, for a buffer may change before it has arrived."""
    pairs = zip(produced, crossing, strict=True)
    return tuple(one.detach() if said.requires_grad else one.detach().clone() for one, said in pairs)


def _require_as_traced(produced: Sequence[Tensor], crossing: Sequence[Crossing], stage: int, index: int) -> None:
    where = f"Stage {stage} of the pipeline, in micro-batch {index},"
    if len(produced) != len(crossing):
        raise ModelError(f"{where} gave {len(produced)} tensors for the next stage, which waits for {len(crossing)}.")
    for one, said in zip(produced, crossing, strict=True):
        if one.shape != torch.Size(said.shape) or one.dtype != said.dtype:
            raise ModelError(
                f"{where} gave {one.dtype} of shape {tuple(one.shape)} where the next stage waits for {said.dtype} of "
                f"shape {tuple(said.shape)}. The shapes that a forward computes with must depend on the shapes of the "
                "batch alone, not on values: pad to a fixed length in the data."
            )
        if one.requires_grad and torch.is_grad_enabled() and not said.requires_grad:
            raise ModelError(
                f"{where} gave a tensor of shape {tuple(one.shape)} that requires a gradient, which it did not when "
                "the model was traced. Freeze and unfreeze parameters before the fit."
            )
