"""Uneven data: every sample counts once, nothing hangs, whatever the ranks."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import paraflow as pf


class Mean(pf.Model):
    """Its loss is the mean of the data, plus a weight whose gradient is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.configure(optimizer="sgd", lr=1.0)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.mean() + self.weight * batch.mean()

    def validation_step(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.mean()

    def predict_step(self, batch: torch.Tensor) -> torch.Tensor:
        return batch * 10


VALUES = torch.tensor([0.0, 1.0, 2.0, 3.0, 8.0])  # mean 2.8; padded to six on two ranks it is another


def evaluated(batch_size: int) -> float:
    return pf.Trainer(progress=False).evaluate(Mean(), VALUES, batch_size=batch_size)["loss"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_counts_every_sample_once(ranks: Any, world_size: int) -> None:
    for batch_size in (1, 2, 4, 5, 9):
        assert ranks(world_size, evaluated, batch_size) == pytest.approx([2.8] * world_size)


def predicted(count: int, batch_size: int) -> list[float]:
    return pf.Trainer(progress=False).predict(Mean(), torch.arange(float(count)), batch_size=batch_size).tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_prediction_is_whole_and_in_order_on_every_rank(ranks: Any, world_size: int) -> None:
    for count in (1, 2, 5, 9):
        for batch_size in (1, 4):
            expected = [10.0 * i for i in range(count)]
            assert ranks(world_size, predicted, count, batch_size) == [expected] * world_size


def per_rank_streams() -> tuple[float, list[float], int]:
    """Rank 0 has five batches and rank 1 seven, of one and of two samples."""
    rank = pf.rank()
    batches = [torch.full((rank + 1,), float(10 * rank + i)) for i in range(5 + 2 * rank)]
    model = Mean()
    model.configure(optimizer="sgd", lr=0.0001)
    losses: list[float] = []

    class Losses(pf.Callback):
        def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
            losses.append(logs["loss"])

    trainer = pf.Trainer(progress=False, callbacks=[Losses()])
    history = trainer.fit(model, pf.data.PerRank(batches))
    return history["loss"][0], losses, trainer.step


def test_five_and_seven_batches_on_two_ranks(ranks: Any) -> None:
    results = ranks(2, per_rank_streams)
    assert results[0] == results[1]
    loss, losses, steps = results[0]
    assert steps == 7
    first = (0.0 + 10.0 * 2) / 3
    assert losses[0] == pytest.approx(first)
    total = sum(range(5)) + 2 * sum(range(10, 17))
    assert loss == pytest.approx(total / (5 + 14), rel=1e-2)


def stopped_together() -> int:
    class Early(pf.Callback):
        def on_epoch_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
            if logs["val_loss"] > 2.5:
                trainer.stop()

    trainer = pf.Trainer(max_epochs=9, progress=False, callbacks=[Early()])
    trainer.fit(Mean(), VALUES, VALUES, batch_size=2)
    return trainer.epoch


def test_ranks_stop_together_on_the_metric_of_all(ranks: Any) -> None:
    assert ranks(2, stopped_together) == [1, 1]


Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    labels: torch.Tensor


X, Y = torch.randn(7, 3), torch.tensor([0, 1, 0, 1, 1, 0, 1])
BATCHES: dict[str, Any] = {
    "tuple": (X, Y),
    "named tuple": Pair(X, Y),
    "frozen dataclass": Frozen(X, Y),
    "mapping": {"x": X, "labels": Y},
    "list of batches": [(X[:4], Y[:4]), (X[4:], Y[4:])],
    "numpy": (X.numpy(), Y.numpy()),
}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.parametrize("kind", BATCHES)
def test_every_kind_of_batch_evaluates_alike(kind: str) -> None:
    model = pf.configure(Net(), loss="cross_entropy", metrics=["accuracy"])
    expected = torch.nn.functional.cross_entropy(model(X), Y).item()
    batch_size = None if kind == "list of batches" else 4
    result = pf.Trainer(progress=False).evaluate(model, BATCHES[kind], batch_size=batch_size)
    assert result["loss"] == pytest.approx(expected, rel=1e-5)
    assert result["accuracy"] == pytest.approx((model(X).argmax(1) == Y).float().mean().item())


@pytest.mark.parametrize("kind", BATCHES)
def test_every_kind_of_batch_trains(kind: str) -> None:
    model = pf.configure(Net(), optimizer="sgd", lr=0.1, loss="cross_entropy")
    history = pf.Trainer(max_epochs=2, progress=False).fit(
        model, BATCHES[kind], batch_size=None if kind == "list of batches" else 4
    )
    assert history["loss"][1] < history["loss"][0]


def test_the_division_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model = pf.configure(Net(), loss="cross_entropy")
    pf.Trainer(accumulate=2).fit(model, (X, Y), batch_size=4)
    printed = capsys.readouterr().out
    assert "batch 4 = 2 a micro-batch × 2 accumulated × 1 data rank" in printed
    assert "epoch 1/1" in printed
