"""Small models with data whose size divides nothing, and what one process computes of them by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import paraflow as pf

IGNORED = -100


def mlp() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


class Classification(pf.Model):
    """A mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.configure(optimizer="adamw", lr=1e-2, loss="cross_entropy", metrics=["accuracy"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class TokenSums(pf.Model):
    """A sum over unmasked tokens, and their number: the gradient weighs every token alike."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.configure(optimizer="adamw", lr=1e-2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        logits = self(x).flatten(0, 1)
        total = functional.cross_entropy(logits, y.flatten(), ignore_index=IGNORED, reduction="sum")
        return total, (y != IGNORED).sum()


class TokenMeans(TokenSums):
    """The same as a mean with its weight, and a scalar beside it."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        loss = functional.cross_entropy(self(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED)
        return {"loss": loss, "weight": int((y != IGNORED).sum()), "tokens_seen": float((y != IGNORED).sum())}


class Output(dict):
    """What a transformers model returns: a mapping whose keys are attributes too."""

    __getattr__ = dict.__getitem__


class OwnLoss(nn.Module):
    """A plain module whose output has a loss, as in transformers: a mean over unmasked labels."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        pf.configure(self, optimizer="adamw", lr=1e-2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Output:
        logits = self.body(x)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        return Output(loss=loss, logits=logits)


def samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, 6, generator=generator), torch.randint(0, 4, (count,), generator=generator)


def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of five tokens, of which some rows have all masked and some none."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 5, 6, generator=generator)
    y = torch.randint(0, 4, (count, 5), generator=generator)
    lengths = torch.randint(0, 6, (count,), generator=generator)
    lengths[::7] = 0
    y[torch.arange(5)[None, :] >= lengths[:, None]] = IGNORED
    return x, y


def as_mapping(pair: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"x": pair[0], "labels": pair[1]}


@dataclass(frozen=True)
class Case:
    """A model, its data, and the mean loss of a whole batch as one would write it by hand."""

    model: Callable[[], nn.Module]
    data: Callable[[int], Any]
    loss: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def _sample_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model.body(x), y)


def _token_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model.body(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED)


CASES: dict[str, Case] = {
    "classification": Case(Classification, samples, _sample_loss),
    "token sums": Case(TokenSums, tokens, _token_loss),
    "token means": Case(TokenMeans, tokens, _token_loss),
    "own loss": Case(OwnLoss, lambda count: as_mapping(tokens(count)), _token_loss),
}

FURTHER: dict[str, Case] = {}
"""What single tests train beside these, and add when they are imported."""
