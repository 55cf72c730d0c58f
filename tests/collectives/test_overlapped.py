"""Averages that begin in backward give what averages after it would, whatever backward comes to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paraflow.collectives import OverlappedAverage
from paraflow.errors import ModelError
from paraflow.mesh import Mesh
from paraflow.plan import Plan

RANKS = 3


class Net(nn.Module):
    """Layers of which some are not used by every rank, one is used twice, and one lies otherwise in memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.twice = nn.Linear(8, 8)
        self.turned = nn.Parameter(torch.randn(8, 8).t())
        self.some = nn.Linear(8, 8)
        self.none = nn.Linear(8, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor, uses_some: bool) -> Tensor:
        x = self.twice(self.twice(self.first(x)).tanh()).tanh() @ self.turned
        last: Tensor = self.last(self.some(x) if uses_some else x)
        return last.sum()


def rows(rank: int, step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * rank + step))


def loss(net: Net, rank: int, step: int) -> Tensor:
    value: Tensor = net(rows(rank, step), uses_some=rank != 1)
    return value


def backwards(net: Net, averaging: OverlappedAverage, rank: int, step: int) -> None:
    """Two backwards, of which the second is the last."""
    averaging.begin_step()
    torch.autograd.backward(0.5 * loss(net, rank, step))
    with averaging.in_last_backward():
        torch.autograd.backward(0.5 * loss(net, rank, step))


def averaging_of(net: nn.Module, dtype: torch.dtype | None = None) -> tuple[OverlappedAverage, int]:
    mesh = Mesh(Plan(dp=RANKS), torch.device("cpu"))
    group = mesh.group_of_places("dp", range(RANKS))
    assert group is not None
    return OverlappedAverage(list(net.parameters()), group, 128, dtype), mesh.rank


def steps_on_a_rank(dtype: torch.dtype | None) -> list[tuple[int, dict[str, Tensor]]]:
    """Four steps, the third after one that every rank breaks off at another place."""
    net, given = Net(), []
    averaging, rank = averaging_of(net, dtype)
    for step in range(4):
        net.zero_grad()
        if step == 2:
            broken_off(net, averaging, rank)
            net.zero_grad()
        backwards(net, averaging, rank, step)
        begun = averaging.begun
        averaging.finish_step()
        given.append((begun, {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}))
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
    return given


def broken_off(net: Net, averaging: OverlappedAverage, rank: int) -> None:
    def stop(_: Tensor) -> None:
        raise RuntimeError("stop")

    weight = (net.last.weight, net.turned, net.first.weight)[rank]
    handle: Any = weight.register_post_accumulate_grad_hook(stop)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="stop"):
        backwards(net, averaging, rank, 0)
    handle.remove()


def expected(step: int) -> dict[str, Tensor]:
    net = Net()
    torch.autograd.backward(torch.stack([loss(net, rank, step) for rank in range(RANKS)]).mean())
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_gradients_are_averaged_in_backward(ranks: Any, dtype: torch.dtype | None) -> None:
    tolerance = 1e-5 if dtype is None else 0.05
    for steps in ranks(RANKS, steps_on_a_rank, dtype):
        for step, (begun, gradients) in enumerate(steps):
            assert (begun > 3) if step else (begun == 0)  # what to wait for is learned from the first step
            torch.testing.assert_close(gradients, expected(step), rtol=tolerance, atol=tolerance)


def looked_at() -> list[Tensor | None]:
    """Three steps; one rank looks at gradients after backward in the first and in the last."""
    net = Net()
    averaging, rank = averaging_of(net)
    for step in range(3):
        net.zero_grad()
        looks = rank == 0 and step != 1
        averaging.begin_step(waits=looks)
        with averaging.in_last_backward():
            torch.autograd.backward(loss(net, rank, step))
        assert (averaging.begun == 0) if looks else (averaging.begun > 3 or not step)
        if looks:
            alone = Net()
            torch.autograd.backward(loss(alone, rank, step))
            assert all(
                p.grad is None or torch.equal(p.grad, other.grad)
                for p, other in zip(net.parameters(), alone.parameters(), strict=True)
            )
        averaging.finish_step()
    return [p.grad for p in net.parameters()]


def test_gradients_that_are_looked_at_are_averaged_later(ranks: Any) -> None:
    for gradients in ranks(RANKS, looked_at):
        found = {
            name: one for (name, _), one in zip(Net().named_parameters(), gradients, strict=True) if one is not None
        }
        torch.testing.assert_close(found, expected(2), rtol=1e-5, atol=1e-5)


def too_often() -> str:
    net = nn.Linear(8, 8)
    averaging, _ = averaging_of(net)

    def last_backwards(number: int) -> None:
        averaging.begin_step()
        with averaging.in_last_backward():
            for _ in range(number):
                torch.autograd.backward(net(torch.ones(1, 8)).sum())

    last_backwards(1)
    averaging.finish_step()
    last_backwards(1)
    averaging.finish_step()
    with pytest.raises(ModelError) as error:
        last_backwards(2)
    last_backwards(1)
    averaging.finish_step()
    return str(error.value)


def test_what_was_taken_for_whole_and_was_not_is_refused(ranks: Any) -> None:
    assert all("more often" in message and "use_reentrant=False" in message for message in ranks(RANKS, too_often))
