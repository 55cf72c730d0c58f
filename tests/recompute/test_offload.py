"""What is copied to the host: each piece of memory once, and nothing that stays on the device anyway."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from paraflow.recompute.offload import Offloaded, Waiting, _Copy


class Views(nn.Module):
    """Saves a weight and views of one, two views of one tensor, a transposed and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 48))

    def forward(self, x: Any) -> Any:
        q, k, v = (x @ self.weight).chunk(3, -1)
        mixed = (q @ k.T) @ v
        return mixed.T.sin() * self.weight.t()[:16, :16] * x.mean()


def run(block: Any, x: torch.Tensor) -> torch.Tensor:
    return block(x).square().sum()


def copies() -> list[_Copy]:
    return [one for one in gc.get_objects() if isinstance(one, _Copy)]


def test_each_piece_of_memory_is_copied_once() -> None:
    block, x = Views(), torch.randn(16, 16)
    wrapped = Offloaded(block, Waiting(min_bytes=64))
    loss = run(wrapped, x)
    # x; q, k and v as one; q @ k; the mixed; its sine; weights times sine and its product before the mean; the result.
    assert sum(one.host.nbytes for one in copies()) <= 4 * 16 * (16 + 48 + 5 * 16 + 16)
    assert not any(
        one.host.nbytes == block.weight.nbytes
        and torch.equal(one.host, block.weight.detach().view(torch.uint8).flatten())
        for one in copies()
    )
    loss.backward()
    offloaded, block.weight.grad = block.weight.grad, None
    run(block, x).backward()
    assert torch.equal(offloaded, block.weight.grad)


def test_small_tensors_stay() -> None:
    loss = run(Offloaded(Views(), Waiting(min_bytes=2**20)), torch.randn(16, 16))
    assert copies() == []
    loss.backward()


@pytest.mark.parametrize("backward", [True, False])
def test_nothing_is_left_after_backward_or_without_one(backward: bool) -> None:
    waiting = Waiting(min_bytes=0)
    first, second = Offloaded(Views(), waiting), Offloaded(Views(), waiting)
    loss = run(second, first(torch.randn(16, 16)))
    there = [weakref.ref(one) for one in copies()]
    assert there
    if backward:
        loss.backward()
    else:
        del loss
    assert not any(reference() for reference in there)


def test_memory_that_is_used_again_is_not_taken_for_what_was_there() -> None:
    class Chain(nn.Module):
        def forward(self, x: Any) -> Any:
            for _ in range(20):
                x = x.sin().exp().sin()
            return x

    def gradient(block: Any) -> torch.Tensor:
        x = torch.linspace(0, 1, 4096, requires_grad=True)
        return torch.autograd.grad(block(x).sum(), x)[0]

    assert torch.equal(gradient(Chain()), gradient(Offloaded(Chain(), Waiting(min_bytes=0))))
