"""Models whose blocks do what is hard to run twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from paraflow.models.causal_lm import CausalLM, CausalLMConfig


class Stack(nn.Module):
    """Blocks, one after another, and a loss."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Any) -> Any:
        return x + self.dropout(self.down(self.up(x).sin().relu()))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return self.linear(self.norm(x)).tanh()


class Router(nn.Module):
    """Noisy top-k of experts, sampled, with a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Any) -> Any:
        noise = torch.empty(x.shape[0], 4).normal_(generator=self.generator)
        logits = self.gate(x) + torch.randn(x.shape[0], 4) + noise
        weights, chosen = logits.topk(2, -1)
        sampled = torch.multinomial(logits.softmax(-1), 1)
        weights = weights.softmax(-1) * torch.rand_like(weights)  # after the sample: the stream must have moved on
        out = x + torch.rand(x.shape[0], 1, generator=self.generator)
        for place, expert in enumerate(self.experts):
            share = (weights * (chosen == place)).sum(-1, keepdim=True) + (sampled == place) * 0.1
            out = out + share * expert(x).tanh()
        return out


class Counting(nn.Module):
    """A buffer that is replaced, one that is written, and both matter for the result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.ones(()))
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Any) -> Any:
        out = self.linear(x).sin() * self.calls + self.average.clone() * x
        self.calls = self.calls + 1
        with torch.no_grad():
            self.average.lerp_(x.mean(0), 0.5)
        return out


class Drawing(nn.Module):
    """Skips itself by Python's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return x + random.random() * self.linear(x).sin()


class Late(nn.Module):
    """From its third call on it draws, chooses, and changes buffers and attributes, in each way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(8, 8), nn.Linear(8, 4)
        self.calls, self.plain, self.memory = 0, torch.ones(8), None
        self.own, self.others = np.random.default_rng(1), random.Random(1)
        self.register_buffer("codes", torch.ones(8))
        self.register_buffer("replaced", torch.ones(8))

    def forward(self, x: Any) -> Any:
        x = self.linear(x).sin() * self.codes.clone() * self.plain.clone() * self.replaced
        if self.memory is not None:
            x = x + self.memory.mean()
        self.calls += 1
        if self.calls < 3:
            return x
        x = x * (random.random() + np.random.randn()) * (self.own.random() + self.others.random())
        with torch.no_grad():
            self.codes.lerp_(x.mean(0), 0.5)
            self.plain.mul_(0.9)
            self.replaced = self.replaced + 1
        self.memory = x.detach().cos()
        weights, chosen = self.gate(x).topk(2, -1)
        return x.sin() + (weights.softmax(-1) * chosen).sum(-1, keepdim=True)


class InPlace(nn.Module):
    """Writes into what a product gave, and into it again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        hidden = self.first(x).add_(1.0).mul_(2.0)
        return self.second(hidden.relu_()).mul_(1.5)


class Twice(nn.Module):
    """Calls one block twice, with its results written in place outside."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([InPlace(), InPlace()])

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        for block in (*self.blocks, *self.blocks):
            y = block(x)
            y += x
            x = y
        return x.square().mean()


class Branching(nn.Module):
    """Takes and gives more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Any, pair: Any, *, scale: float, named: Any = None, extra: Any = None) -> Any:
        y = self.linear(x).sin() * scale + pair[0].cos() + pair[1]
        if named is not None:
            y = y + named["bias"].exp()
        return {"y": y, "pair": (y.sin(), x.shape[0]), "none": extra}


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([Branching(), Branching()])

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        first = self.blocks[0](x, (x * 2, 1.0), scale=0.5)
        second = self.blocks[1](first["y"], [first["pair"][0], 2], scale=2.0, named={"bias": x})
        assert second["none"] is None
        return second["pair"][0].mean() + second["y"].square().mean()


def cnn() -> nn.Module:
    def block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        )

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(block(1, 4), block(4, 4), nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True), block(4, 2))

        def forward(self, x: Any) -> Any:
            return self.body(x.view(-1, 1, 2, 3).repeat(1, 1, 4, 3)).square().mean()

    return Net()


class Language(nn.Module):
    """A transformer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = CausalLM(CausalLMConfig(vocab_size=11, layers=2, hidden=16, heads=2, context=8, dropout=0.2))

    def forward(self, x: Any) -> Any:
        tokens = (x.abs() * 100).long() % 11
        return self.net.training_step(tokens)["loss"]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: Stack(MLP(), MLP(), MLP()),
    "normed": lambda: Stack(Normed(), Normed()),
    "router": lambda: Stack(Router(), Router()),
    "counting": lambda: Stack(Counting(), Counting()),
    "drawing": lambda: Stack(Drawing(), Drawing()),
    "late": lambda: Stack(Late(), Late()),
    "in place": lambda: Stack(InPlace(), InPlace()),
    "twice": Twice,
    "branches": Branches,
    "cnn": cnn,
    "language": Language,
}
