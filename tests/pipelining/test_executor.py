"""Stages on real ranks: the gradients of one process, for every schedule, with uneven micro-batches and side values."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paraflow.debug.collectives import CollectiveCheck
from paraflow.errors import ModelError
from paraflow.mesh import Mesh
from paraflow.pipelining.executor import Executor, Turn
from paraflow.pipelining.orders import Kind, Schedule
from paraflow.plan import Plan
from tests.pool import Pool

pytestmark = pytest.mark.parity

WIDTH = 6
BLOCKS = 8
CASES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved_zero_bubble", 1)]
CASES += [("interleaved_zero_bubble", 2), ("zbv", 2)]


class Block(nn.Module):
    """Changes what it is given in place, as models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x += 0.1
        return x + self.linear(torch.tanh(self.norm(x))) * mask.unsqueeze(-1)


class Net(nn.Module):
    """Blocks with a mask of integers, a skip from the first to the last, and a value that nobody uses in the end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.blocks[0].linear.weight.requires_grad_(False)
        self.blocks[5].linear.weight = self.blocks[4].linear.weight

    def stage(self, stage: int, stages: int, received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        x, skip, idle, mask, half = received
        assert stage == 0 or skip.transpose(0, 1).is_contiguous(), "it lies in memory as where it was made"
        span = BLOCKS // stages
        for place in range(stage * span, (stage + 1) * span):
            x = self.blocks[place](x, mask)
            half = half + x.detach().mean().to(half.dtype)
            if place == 0:
                skip, idle = x.transpose(0, 1).relu(), x[:, :1] * 2
        return x, skip, idle, mask.T.contiguous().T, half

    def begin(self, ids: Tensor) -> tuple[Tensor, ...]:
        x = torch.sin(ids.float().unsqueeze(-1) * torch.arange(1.0, WIDTH + 1))
        return x, x, x, (ids % 3).long(), torch.zeros(2, dtype=torch.bfloat16)

    def loss(self, received: Sequence[Tensor]) -> Tensor:
        x, skip, _, mask, half = received
        return (x * mask.unsqueeze(-1)).pow(2).sum() + (x * skip.transpose(0, 1)).sum() + half.float().sum()


@dataclass(frozen=True)
class Said:
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    stride: tuple[int, ...] = ()


@dataclass(frozen=True)
class Crossings:
    crossing: tuple[tuple[Said, ...], ...]


def traffic(ids: Tensor, stages: int) -> Crossings:
    rows, length = ids.shape
    floats = torch.float32
    each = (
        Said((rows, length, WIDTH), floats, True),
        Said((length, rows, WIDTH), floats, True, (WIDTH, length * WIDTH, 1)),
        Said((rows, 1, WIDTH), floats, True),
        Said((rows, length), torch.int64, False),
        Said((2,), torch.bfloat16, False),
    )
    return Crossings((each,) * (stages - 1))


class Token(torch.autograd.Function):
    """Marks a graph, so that one can see how long it lives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alive: weakref.WeakSet[Any]) -> Tensor:
        ctx.alive = Mark()
        alive.add(ctx.alive)
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class Mark: ...


@dataclass
class HandMade:
    """The work of the stages, written by hand."""

    net: Net
    batch: list[Tensor]
    stages: int
    turns: list[Turn] = field(default_factory=list)
    called: list[tuple[str, int, int]] = field(default_factory=list)
    losses: dict[int, Tensor] = field(default_factory=dict)
    alive: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    most: int = 0

    def forward(self, stage: int, index: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        values = received if stage else self.net.begin(self.batch[index])
        produced = list(self.net.stage(stage, self.stages, values))
        produced[0] = Token.apply(produced[0], self.alive)
        self.most = max(self.most, len(self.alive))
        if stage < self.stages - 1:
            return tuple(produced)
        loss = self.net.loss(produced)
        self.losses[index] = loss.detach()
        return (loss,)

    def around(self, turn: Turn) -> contextlib.AbstractContextManager[None]:
        self.turns.append(turn)
        return contextlib.nullcontext()

    def before_backward(self, stage: int, index: int) -> None:
        self.called.append(("before", stage, index))

    def after_backward(self, stage: int, index: int) -> None:
        self.called.append(("after", stage, index))


def batch_of(count: int) -> list[Tensor]:
    """Micro-batches of different sizes."""
    return [torch.arange((2 + i % 3) * (3 + i % 2)).reshape(2 + i % 3, 3 + i % 2) + i for i in range(count)]


def whole(count: int) -> tuple[dict[str, Tensor | None], list[float]]:
    net, losses = Net(), []
    for ids in batch_of(count):
        loss = net.loss(net.stage(0, 1, net.begin(ids)))
        loss.backward()
        losses.append(float(loss.detach()))
    return {name: parameter.grad for name, parameter in net.named_parameters()}, losses


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def compare(mesh: Mesh, name: str, chunks: int, count: int) -> None:
    schedule = Schedule(name, mesh.degree("pp"), chunks)
    place, stages = mesh.coordinate("pp"), schedule.stages
    batch = batch_of(count)
    work, crossing = HandMade(Net(), batch, stages), [traffic(ids, stages) for ids in batch]
    executor = Executor(mesh, schedule)
    executor.run(work, crossing)
    assert not work.alive, f"{len(work.alive)} graphs outlive the step"
    expected, losses = whole(count)
    own = {f"blocks.{s * BLOCKS // stages + i}." for s in schedule.stages_of(place) for i in range(BLOCKS // stages)}
    for key, parameter in work.net.named_parameters():
        if key == "blocks.4.linear.weight" and len({"blocks.4.", "blocks.5."} & own) == 1:
            continue  # a tied weight has a part of its gradient on each stage; who holds it sums them
        wanted = expected[key] if any(key.startswith(prefix) for prefix in own) else None
        assert (parameter.grad is None) == (wanted is None), key
        if wanted is not None:
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-6, atol=1e-6, msg=f"{key} in {schedule}")
    if place == schedule.places[-1]:
        assert [float(work.losses[index]) for index in range(count)] == pytest.approx(losses, rel=1e-6)
    if name == "1f1b":
        assert work.most == min(count, stages - place)
    check_turns(work, schedule, place, count)
    check_forward_only(executor, work, crossing, losses)


def check_turns(work: HandMade, schedule: Schedule, place: int, count: int) -> None:
    ran = schedule.stages_of(place)
    each = {(stage, index) for stage in ran for index in range(count)}
    for what in ("before", "after"):
        said = [(stage, index) for kind, stage, index in work.called if kind == what]
        assert len(said) == len(each)
        assert set(said) == each
    for part in ("forward", "backward"):
        turns = [turn for turn in work.turns if turn.part == part]
        assert [turn.ordinal for turn in turns] == list(range(len(turns)))
        assert {turn.count for turn in turns} == {len(turns)}
        assert sorted(turn.action.stage for turn in turns if turn.ends_stage) == sorted(ran)


def check_forward_only(executor: Executor, work: HandMade, crossing: Sequence[Any], losses: list[float]) -> None:
    before, work.losses = len(work.turns), {}
    with torch.no_grad():
        executor.forward_only(work, crossing)
    assert len(work.turns) == before
    for index, loss in work.losses.items():
        assert float(loss) == pytest.approx(losses[index], rel=1e-6)


def every_schedule(counts: Sequence[int], plans: Sequence[Plan]) -> None:
    with no_collector():  # what is let go of late, by the collector of cycles, would be seen
        for plan in plans:
            mesh = Mesh(plan, torch.device("cpu"))
            for name, chunks in CASES:
                for count in counts:
                    compare(mesh, name, chunks, count)
            with CollectiveCheck(mesh, step=lambda: 0):  # debug mode; it has nothing to say about messages
                compare(mesh, "1f1b", 1, 2)


def test_every_schedule_gives_the_gradients_of_one_process_on_two_ranks(ranks: Pool) -> None:
    ranks(2, every_schedule, (1, 2, 3, 4, 8), [Plan(pp=2)])


def test_every_schedule_gives_the_gradients_of_one_process_on_four_ranks(ranks: Pool) -> None:
    ranks(4, every_schedule, (1, 3, 8), [Plan(pp=4), Plan(pp=2, dp=2)])


class Astray(HandMade):
    """Gives what the next stage does not wait for."""

    def forward(self, stage: int, index: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        produced = super().forward(stage, index, received)
        return produced if stage else (produced[0][:1], *produced[1:])


def test_a_stage_that_gives_other_shapes_than_were_traced_is_told_so_before_anything_is_sent() -> None:
    batch = batch_of(1)
    executor = Executor(Mesh(Plan(), torch.device("cpu")), Schedule("zbv", 1, 2))
    with pytest.raises(ModelError, match=r"Stage 0 .* shape \(1, 3, 6\) where .* \(2, 3, 6\).*on the shapes of the"):
        executor.run(Astray(Net(), batch, 2), [traffic(ids, 2) for ids in batch])


def test_two_stages_of_one_rank_pass_values_on_without_a_message() -> None:
    with no_collector():
        compare(Mesh(Plan(), torch.device("cpu")), "zbv", 2, 3)
    assert all(action.kind in (Kind.FORWARD, *HALVES) for action in Schedule("zbv", 1, 2).order(3)[0])


HALVES = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
