"""Tiny models with repeated blocks, most of whose sizes four ranks do not divide, and their data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import paraflow as pf

IGNORED = -100
WIDTH, TOKENS = 7, 8
VOCABULARY = 1_003  # tokens, and classes: so many that they are divided
DRAWN = (1, 250, 502, 770, 1_001)  # the classes there are samples of


class Attention(nn.Module):
    """Four heads, two of which share keys and values."""

    head_dim = 3

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        # A bias of the keys changes nothing, and its gradient is but rounding.
        self.key, self.value = nn.Linear(WIDTH, 6, bias=False), nn.Linear(WIDTH, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        heads = functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return self.out(heads.transpose(1, 2).flatten(2))


class Block(nn.Module):
    runs = 0  # of all blocks in training, but for compiled ones, and those that a pipeline only traces

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.before, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not torch.compiler.is_compiling() and type(x) is torch.Tensor:
            Block.runs += 1
        x = x + self.attention(self.before(x))
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Classes(pf.Model):
    """Three blocks between a stem and a head, which looks at the mean over a sequence."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        with torch.no_grad():
            self.head.bias.fill_(-4.0)[list(DRAWN)] = 0.0  # so that some samples are classified rightly
        # A large epsilon: where a gradient is next to nothing, Adam would divide one rounding by another.
        self.configure(optimizer="adamw", lr=1e-2, eps=1e-3, loss="cross_entropy", metrics=["accuracy"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Words(pf.Model):
    """Tokens in, tokens out, one table for both; the loss is a sum over the tokens that are not masked."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.table.weight
        self.configure(optimizer="adamw", lr=1e-2, eps=1e-3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        logits = self(x).flatten(0, 1)
        total = functional.cross_entropy(logits, y.flatten(), ignore_index=IGNORED, reduction="sum")
        return total, (y != IGNORED).sum()


def frozen() -> Classes:
    """The stem, a whole block and one layer of another are frozen."""
    model = Classes()
    for part in (model.stem, model.blocks[0], model.blocks[1].up):
        part.requires_grad_(False)
    return model


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, TOKENS, 6, generator=generator)
    return x, torch.tensor(DRAWN)[torch.randint(0, len(DRAWN), (count,), generator=generator)]


def words(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of eight tokens, of which some have all targets masked and some none."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(0, VOCABULARY, (count, TOKENS), generator=generator)
    y = torch.randint(0, VOCABULARY, (count, TOKENS), generator=generator)
    lengths = torch.randint(0, TOKENS + 1, (count,), generator=generator)
    lengths[::7] = 0
    y[torch.arange(TOKENS)[None, :] >= lengths[:, None]] = IGNORED
    return x, y


@dataclass(frozen=True)
class Case:
    """A kind of run: its model, its data, and what is done besides training.

    Attributes:
        model: Makes the model.
        data: Makes so many samples.
        count: The samples of an epoch, in batches of eight.
        blocks: How often a block runs in one forward.
        callbacks: Makes the callbacks.
        resumes: Whether the run goes on from what one device has saved.
        reads: Whether it evaluates and predicts afterwards.
        random: Whether ranks draw random numbers of their own while they train.
    """

    model: Callable[[], nn.Module] = Classes
    data: Callable[[int], Any] = rows
    count: int = 24
    blocks: int = 3
    callbacks: Callable[[], list[pf.Callback]] = list
    resumes: bool = False
    reads: bool = False
    random: bool = False


CASES: dict[str, Case] = {
    "plain": Case(),
    "tied": Case(lambda: Words(tied=True), words),
    "frozen": Case(frozen),
    "dropout": Case(lambda: Classes(dropout=0.3), random=True),
    "uneven": Case(count=19),  # a last batch of three: one of four ranks has no sample
    "counted": Case(lambda: Words(tied=False), words, count=22),
    "ema": Case(callbacks=lambda: [pf.callbacks.EMA(decay=0.5)]),
    "evaluate": Case(reads=True),
    "resume": Case(resumes=True),
}
"""By the `run` of a feature (`paraflow.compatibility`)."""
