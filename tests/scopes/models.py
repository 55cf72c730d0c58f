"""Models whose parts are made in scopes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

import paraflow as pf


def top3(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The share of samples whose class is among the three with the highest scores."""
    return (output.topk(3, dim=-1).indices == target[:, None]).any(-1).float().mean()


class HeadBeside(pf.Model):
    """Features that are replicated, and a head that is split over the ranks that make them, unless `scoped` is off."""

    def __init__(
        self,
        classes: int = 10,
        smoothing: float = 0.0,
        *,
        deep: bool = False,
        scoped: bool = True,
        over: int | None = None,
        ranks: int | None = None,
    ) -> None:
        super().__init__()
        with _maybe(pf.replica(ranks), scoped):
            self.features = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        with _maybe(pf.split(over), scoped):
            self.head = _deep_head(classes) if deep else nn.Linear(8, classes)
        loss = nn.CrossEntropyLoss(label_smoothing=smoothing)
        self.configure(optimizer="adamw", lr=1e-2, loss=loss, metrics={"accuracy": "accuracy", "top3": top3})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


def _deep_head(classes: int) -> nn.Module:
    """A pair that is split by its inner features, a norm that is whole, and the layer of the classes."""
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8), nn.LayerNorm(8), nn.Linear(8, classes))


def _maybe(scope: AbstractContextManager[Any], scoped: bool) -> AbstractContextManager[Any]:
    return scope if scoped else nullcontext()


class RowsBeside(HeadBeside):
    """A head that is split by its inputs."""

    def __init__(self, *, scoped: bool = True) -> None:
        super().__init__(scoped=False)
        with _maybe(pf.split(dim=1), scoped):
            self.head = nn.Linear(8, 10)


class TableBeside(pf.Model):
    """An embedding that is split over ranks with samples of their own, before layers that are whole."""

    def __init__(self, *, scoped: bool = True) -> None:
        super().__init__()
        with _maybe(pf.split(), scoped):
            self.table = nn.Embedding(17, 8, padding_idx=3)
        self.head = nn.Linear(8, 16)
        self.configure(optimizer="sgd", lr=0.1, loss="cross_entropy", metrics=["accuracy"])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens).mean(1))


class TiedBeside(pf.Model):
    """An embedding and the output layer that has its weight, both split over ranks with samples of their own."""

    def __init__(self, *, scoped: bool = True) -> None:
        super().__init__()
        with _maybe(pf.split(), scoped):
            self.table = nn.Embedding(17, 8)
            self.head = nn.Linear(8, 17, bias=False)
            self.head.weight = self.table.weight
        self.middle = nn.Linear(8, 8)
        self.configure(optimizer="sgd", lr=0.5, loss="cross_entropy", metrics=["accuracy"])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.table(tokens)).tanh().mean(1))


class Inside(pf.Model):
    """Blocks that are split inside a replica, between layers that are whole, and a head that is split by itself."""

    def __init__(self, *, scoped: bool = True) -> None:
        super().__init__()
        with _maybe(pf.replica(), scoped):
            self.features = nn.Linear(6, 8)
            with _maybe(pf.split(2), scoped):
                self.block = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
                self.lone = nn.Linear(8, 8)
            with _maybe(pf.split(2, dim=1), scoped):
                self.rows = nn.Linear(8, 8)
            self.norm = nn.LayerNorm(8)
            with _maybe(pf.split(2), scoped):
                self.head = nn.Linear(8, 10)
        self.configure(optimizer="adamw", lr=1e-2, loss="cross_entropy", metrics=["accuracy"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.rows(self.lone(self.block(self.features(x))))))


class Staged(pf.Model):
    """Two stages of two layers, one of which is split."""

    def __init__(self, *, scoped: bool = True) -> None:
        super().__init__()
        with _maybe(pf.pipeline(2), scoped):
            with _maybe(pf.stage(), scoped):
                self.first = nn.Linear(6, 8)
                with _maybe(pf.split(2), scoped):
                    self.second = nn.Linear(8, 8)
            with _maybe(pf.stage(), scoped):
                self.third = nn.Linear(8, 8)
                with _maybe(pf.split(2), scoped):
                    self.head = nn.Linear(8, 10)
        self.configure(optimizer="adamw", lr=1e-2, loss="cross_entropy", metrics=["accuracy"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.third(self.second(self.first(x)).tanh()).tanh())


class Fits(pf.Model):
    """What is laid out by itself."""

    def __init__(self, *, scoped: bool = True) -> None:
        super().__init__()
        with _maybe(pf.auto_parallel(), scoped):
            self.body = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
            self.head = nn.Linear(6, 10)
        self.configure(optimizer="adamw", lr=1e-2, loss="cross_entropy", metrics=["accuracy"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Blocks(nn.Module):
    """An embedding, four blocks and a norm before a head; `cut` stages hold the blocks, nothing holds the rest."""

    def __init__(self, cut: int = 2, width: int | None = None, *, scoped: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList()
        with _maybe(pf.replica(), scoped), _maybe(pf.pipeline(micro_batches=4, schedule="1f1b"), scoped):
            for _ in range(cut):
                with _maybe(pf.stage(), scoped):
                    for _ in range(4 // cut):
                        self.blocks.append(self._block(width, scoped))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16)
        pf.configure(self, optimizer="adamw", lr=1e-2, loss="cross_entropy", metrics=["accuracy"])

    def _block(self, width: int | None, scoped: bool) -> nn.Module:
        with _maybe(pf.split(width), scoped and width is not None):
            return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x)).mean(1)


def vectors(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and classes for `HeadBeside`."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, 6, generator=generator), torch.randint(0, 10, (count,), generator=generator)


def sentences(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and classes for `Blocks`."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 16, (count, 5), generator=generator)
    return tokens, torch.randint(0, 16, (count,), generator=generator)
