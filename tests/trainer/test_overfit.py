"""``overfit=n``: the same n batches in every epoch, until the model knows them by heart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import paraflow as pf

COUNT, BATCH = 20, 4
X = torch.arange(float(COUNT)).view(COUNT, 1)
Y = torch.zeros(COUNT, 1)


class Ids(pf.Model):
    """Notes which samples it is given: a sample's first number is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.trained: list[list[float]] = []
        self.validated: list[list[float]] = []
        self.configure(optimizer="sgd", lr=1e-9)

    def training_step(self, batch: Any) -> torch.Tensor:
        self.trained.append(batch[0][:, 0].tolist())
        return self.weight * batch[0].sum()

    def validation_step(self, batch: Any) -> torch.Tensor:
        self.validated.append(batch[0][:, 0].tolist())
        return self.weight * 1.0


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(X, Y, strict=True))


def batches() -> Iterator[Any]:
    yield from zip(X.split(BATCH), Y.split(BATCH), strict=True)


SOURCES: dict[str, Callable[[], Any]] = {
    "arrays": lambda: (X, Y),
    "dataset": lambda: TensorDataset(X, Y),
    "loader": lambda: DataLoader(TensorDataset(X, Y), batch_size=BATCH, shuffle=True),
    "loader with workers": lambda: DataLoader(TensorDataset(X, Y), batch_size=BATCH, shuffle=True, num_workers=2),
    "stream": lambda: DataLoader(Streamed(), batch_size=BATCH),
    "stream with a worker": lambda: DataLoader(Streamed(), batch_size=BATCH, num_workers=1),
    "function": lambda: batches,
    "list": lambda: list(batches()),
}


def fit(source: str, overfit: int | None, epochs: int = 3, **options: Any) -> tuple[Ids, pf.Trainer]:
    model = Ids()
    size = BATCH if source in ("arrays", "dataset") else None
    trainer = pf.Trainer(max_epochs=epochs, progress=False, overfit=overfit, **options)
    trainer.fit(model, SOURCES[source](), SOURCES[source](), batch_size=size)
    return model, trainer


@pytest.mark.parametrize("source", SOURCES)
def test_each_epoch_has_exactly_the_same_batches(source: str) -> None:
    """They are the first two of the first epoch of the run without it."""
    free, _ = fit(source, None, epochs=1)
    model, trainer = fit(source, 2)
    assert model.trained == free.trained[:2] * 3
    assert len(free.trained) == COUNT // BATCH
    assert model.validated == free.validated[:2] * 3
    assert (trainer.step, trainer.epoch) == (6, 3)


@pytest.mark.parametrize("source", ["arrays", "loader", "function"])
def test_more_than_there_are_is_all_the_data_in_one_order(source: str) -> None:
    free, _ = fit(source, None, epochs=1)
    model, _ = fit(source, 99)
    assert model.trained == free.trained * 3
    assert sorted(number for batch in model.trained[:5] for number in batch) == X[:, 0].tolist()


def test_the_lengths_are_those_of_the_batches() -> None:
    _, trainer = fit("arrays", 2)
    assert (trainer.steps_per_epoch, trainer.total_steps) == (2, 6)
    assert len(trainer.history["loss"]) == 3


class Noisy(Dataset[Any]):
    """Augments: the same sample is another one each time."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return X[index] + torch.rand(1), Y[index]


def test_augmentation_is_the_same_in_every_epoch() -> None:
    model = Ids()
    pf.Trainer(max_epochs=3, progress=False, overfit=2).fit(model, Noisy(), batch_size=BATCH)
    assert model.trained[:2] == model.trained[2:4] == model.trained[4:]
    assert model.trained[0] != model.trained[1]


def test_it_learns_what_can_be_learned() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(200, 6, generator=generator), torch.randint(0, 3, (200,), generator=generator)
    body = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 3))
    pf.configure(body, optimizer="adam", lr=1e-2, loss="cross_entropy", metrics=["accuracy"])
    history = pf.Trainer(max_epochs=200, progress=False, overfit=2).fit(body, (x, y), batch_size=10)
    assert history["loss"][0] > 0.9
    assert history["loss"][-1] < 0.02
    assert history["accuracy"][-1] == 1.0


@pytest.mark.parametrize("source", ["arrays", "loader with workers", "function"])
def test_it_is_resumed_in_the_middle_of_an_epoch(tmp_path: Path, source: str) -> None:
    def run(model: Ids, folder: str, **options: Any) -> None:
        saving = pf.callbacks.Checkpoint(tmp_path / folder, 1)
        trainer = pf.Trainer(progress=False, overfit=3, callbacks=[saving], **options)
        size = BATCH if source == "arrays" else None
        trainer.fit(model, SOURCES[source](), batch_size=size, resume="auto")

    whole, first, rest = Ids(), Ids(), Ids()
    run(whole, "whole", max_epochs=3)
    run(first, "parts", max_steps=5)
    run(rest, "parts", max_epochs=3)
    assert len(whole.trained) == 9
    assert first.trained + rest.trained == whole.trained


def on_a_rank() -> list[list[float]]:
    return fit("arrays", 2)[0].trained


def test_two_ranks_share_the_same_batches(ranks: Any) -> None:
    whole = fit("arrays", 2)[0].trained
    first, second = ranks(2, on_a_rank)
    assert [sorted(a + b) for a, b in zip(first, second, strict=True)] == [sorted(batch) for batch in whole]
