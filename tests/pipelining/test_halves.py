"""A backward in two halves gives the gradients of a backward in one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from paraflow.pipelining.halves import SplitBackward


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        hidden = self.norm(x)
        hidden = self.attention(hidden, hidden, hidden)[0]
        return x + self.down(torch.relu(self.up(hidden))) + bias


class Stage(nn.Module):
    """What makes halves hard: a tied and a frozen weight, a bias all blocks add, one output beside the others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.blocks[1].down.weight = self.blocks[0].down.weight
        self.blocks[0].up.weight.requires_grad_(False)
        self.positions = nn.Parameter(torch.randn(5, width))
        self.embedding = nn.Linear(width, width)
        self.side = nn.Parameter(torch.randn(width))
        self.convolution = nn.Conv1d(5, 5, 1)
        self.unused = nn.Linear(width, width)

    def forward(self, x: Tensor, relayed: Tensor) -> tuple[Tensor, ...]:
        bias = torch.tanh(self.embedding(self.positions))
        for block in self.blocks:
            x = block(x, bias)
            x.register_hook(lambda gradient: gradient * 0.5)
        hidden = self.convolution(x.relu_())
        return hidden.transpose(0, 1), self.side * bias, relayed, (relayed * self.positions).unbind(0)[0]


def gradients(stage: Stage, inputs: Sequence[Tensor], *, split: bool) -> tuple[dict[str, Tensor | None], set[str]]:
    """The gradients of inputs and parameters, and the names of parameters that had theirs after the first half."""
    stage.zero_grad()
    leaves = [one.clone().requires_grad_() for one in inputs]
    outputs = stage(*(leaf.clone() for leaf in leaves))
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(one.shape, generator=generator) for one in outputs]
    first: set[str] = set()
    if split:
        halves = SplitBackward([get_gradient_edge(one) for one in outputs], leaves)
        del outputs
        halves.of_inputs(given)
        first = {name for name, parameter in stage.named_parameters() if parameter.grad is not None}
        halves.of_weights()
    else:
        torch.autograd.backward(outputs, given)
    named = {name: parameter.grad for name, parameter in stage.named_parameters()}
    return {**named, "x": leaves[0].grad, "relayed": leaves[1].grad}, first


def test_two_halves_give_the_gradients_of_one_backward() -> None:
    torch.manual_seed(0)
    stage, inputs = Stage(4), [torch.randn(3, 5, 4), torch.randn(5, 4)]
    whole, _ = gradients(stage, inputs, split=False)
    halved, first = gradients(stage, inputs, split=True)
    for name, expected in whole.items():
        if expected is None:
            assert halved[name] is None
        else:
            torch.testing.assert_close(halved[name], expected, rtol=1e-6, atol=1e-6)
    assert first == {"positions", "embedding.weight", "embedding.bias", "side", "blocks.0.down.weight"}


def test_what_waits_for_gradients_is_told_once_of_each() -> None:
    stage, told = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), []
    for parameter in stage.parameters():
        parameter.register_post_accumulate_grad_hook(told.append)
    x = torch.ones(2, 3, requires_grad=True)
    halves = SplitBackward([get_gradient_edge(stage(x).sum())], [x])
    halves.of_inputs([torch.ones(())])
    assert told == []
    halves.of_weights()
    assert sorted(map(id, told)) == sorted(map(id, stage.parameters()))
