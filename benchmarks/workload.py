"""The work that every contender is given, the hand-written loop, and how the two take turns.

A contender trains for some epochs by its own means and calls `Turns.epoch_begins` at the beginning of each. That call
stops its clock, runs one epoch of the hand-written loop in the same process, and starts its clock again. So each epoch
of a contender is compared with an epoch of the hand-written loop that ran just before it, in the same process, under
the same load and with the same modules imported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional

FEATURES, HIDDEN, CLASSES = 32, 64, 10
BATCH_SIZE = 32
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 1e-2
WARM_UP = 2
"""Epochs of each process that are not counted."""

Loop = Callable[[], float]
"""Trains for one epoch, and returns its mean loss."""


@dataclass(frozen=True)
class Size:
    """How much is measured in one process.

    Attributes:
        steps: Optimizer steps of an epoch.
        epochs: Epochs that are counted.
    """

    steps: int
    epochs: int

    @property
    def samples(self) -> int:
        """Samples of an epoch, all of them in full batches."""
        return self.steps * BATCH_SIZE

    @property
    def trained_epochs(self) -> int:
        """Epochs to train: warm-up, those that count, and a last one whose end is not seen."""
        return WARM_UP + self.epochs + 1


def make_model() -> nn.Sequential:
    """A perceptron of 32-64-64-10."""
    return nn.Sequential(
        nn.Linear(FEATURES, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, CLASSES),
    )


def make_data(size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [samples, 32] of fp32 and classes [samples] of int64."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(size.samples, FEATURES, generator=generator)
    return inputs, inputs[:, :CLASSES].argmax(1)


def make_optimizer(model: nn.Module, fused: bool = False) -> torch.optim.Optimizer:
    """AdamW, as torch makes it by default or fused."""
    return torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True if fused else None
    )


def hand_written(size: Size, fused: bool = False) -> Loop:
    """The loop a careful person writes: it knows its epoch's mean loss, and no step waits for a number."""
    model, (inputs, targets) = make_model(), make_data(size)
    optimizer = make_optimizer(model, fused)

    def epoch() -> float:
        total = torch.zeros(())
        for rows in torch.randperm(len(inputs)).split(BATCH_SIZE):  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs[rows]), targets[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.detach()
        return total.item() / size.steps

    return epoch


@dataclass
class Turns:
    """Lets a contender and the hand-written loop take turns, an epoch each.

    Attributes:
        size: How much is measured.
        make_reference: Makes the hand-written loop, when the contender is ready to begin.
        pairs: Seconds of an epoch, of the hand-written loop and of the contender, turn by turn.
    """

    size: Size
    make_reference: Callable[[], Loop]
    pairs: list[tuple[float, float]] = field(default_factory=list)
    _reference: Loop | None = None
    _reference_seconds: float = 0.0
    _began: float | None = None

    def epoch_begins(self, *_: object) -> None:
        """To be called by the contender at the beginning of each of its epochs."""
        now = time.perf_counter()
        if self._began is not None:
            self.pairs.append((self._reference_seconds, now - self._began))
        if self._reference is None:
            self._reference = self.make_reference()
        start = time.perf_counter()
        self._reference()
        self._began = time.perf_counter()
        self._reference_seconds = self._began - start

    def epochs(self) -> Iterator[int]:
        """For contenders that are loops themselves."""
        for epoch in range(self.size.trained_epochs):
            self.epoch_begins()
            yield epoch

    def microseconds(self) -> list[tuple[float, float]]:
        """The counted pairs, in microseconds a step.

        Raises:
            RuntimeError: The contender trained fewer epochs than it was to.
        """
        counted = self.pairs[WARM_UP:]
        if len(counted) < self.size.epochs:
            raise RuntimeError(f"{len(counted)} epochs were measured, not {self.size.epochs}")
        return [(ours * 1e6 / self.size.steps, theirs * 1e6 / self.size.steps) for ours, theirs in counted]
