"""Small real runs for the tests of callbacks: two steps an epoch, and validation that gives what it is told to."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

import paraflow as pf


class Scripted(nn.Module):
    """A linear model whose n-th validation gives the n-th of some values."""

    def __init__(self, values: list[float], name: str = "loss") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(2, 1)
        self.name = name
        self.remaining = list(values)
        pf.configure(self, optimizer="sgd", lr=0.1)

    def training_step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return functional.mse_loss(self.linear(x).squeeze(-1), y)

    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        value = torch.tensor(self.remaining.pop(0))
        return {"loss": value} if self.name == "loss" else {"loss": torch.tensor(0.0), self.name: value}


def samples(count: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(1))
    return x, x.sum(1)


def linear() -> nn.Module:
    torch.manual_seed(0)
    return pf.configure(nn.Linear(2, 1), optimizer="sgd", lr=0.1, loss="mse")
