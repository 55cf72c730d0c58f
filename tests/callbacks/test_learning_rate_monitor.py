"""Each group's numbers are those that its step was made with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import paraflow as pf
from paraflow.callbacks import LambdaCallback
from paraflow.callbacks.learning_rate_monitor import LearningRateMonitor
from tests.callbacks.runs import samples


class Grouped(nn.Module):
    """Two groups; the schedule halves both learning rates after each step."""

    def __init__(self, optimizer: Any, *names: str, tensors: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 1)
        self._optimizer, self._names, self._tensors = optimizer, names, tensors

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)).squeeze(-1)

    def training_step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def configure_optimizers(self) -> Any:
        groups: list[dict[str, Any]] = [
            {"params": self.body.parameters(), "lr": torch.tensor(0.1) if self._tensors else 0.1},
            {"params": self.head.parameters(), "lr": torch.tensor(0.4) if self._tensors else 0.4, "weight_decay": 0.5},
        ]
        for group, name in zip(groups, self._names, strict=False):
            group["name"] = name
        optimizer = self._optimizer(groups)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def record(monitor: LearningRateMonitor, model: nn.Module, **options: Any) -> tuple[list[dict[str, float]], list[Any]]:
    steps: list[dict[str, float]] = []
    epochs: list[dict[str, float]] = []
    note = LambdaCallback(
        on_step_end=lambda trainer, logs: steps.append({**logs}),
        on_epoch_end=lambda trainer, logs: epochs.append({**logs}),
    )
    pf.Trainer(max_epochs=1, callbacks=[monitor, note], progress=False, **options).fit(model, samples(12), batch_size=4)
    for logs in (*steps, *epochs):
        assert logs.pop("loss") > 0
    return steps, epochs


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, momentum=0.75)


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        ((), ("lr/0", "lr/1")),
        (("body", "head"), ("lr/body", "lr/head")),
        (("same", "same"), ("lr/same-0", "lr/same-1")),
    ],
)
@pytest.mark.parametrize("tensors", [False, True])
def test_each_group_by_its_name(names: Any, keys: tuple[str, str], tensors: bool) -> None:
    steps, epochs = record(LearningRateMonitor(), Grouped(torch.optim.SGD, *names, tensors=tensors))
    for logs, factor in zip((*steps, *epochs), (1.0, 0.5, 0.25, 0.25), strict=True):
        assert logs.keys() == {"lr", *keys}
        assert (logs[keys[0]], logs[keys[1]]) == pytest.approx((0.1 * factor, 0.4 * factor))
        if not tensors:  # which the schedule changes in place
            assert logs["lr"] == logs[keys[0]]


def test_momentum_and_weight_decay_on_demand() -> None:
    steps, _ = record(LearningRateMonitor(momentum=True, weight_decay=True), Grouped(sgd))
    assert steps[0] == pytest.approx(
        {
            "lr": 0.1,
            "lr/0": 0.1,
            "lr/1": 0.4,
            "momentum/0": 0.75,
            "momentum/1": 0.75,
            "weight_decay/0": 0.0,
            "weight_decay/1": 0.5,
        }
    )


def test_of_a_single_group_the_learning_rate_is_there_already() -> None:
    model = pf.configure(nn.Linear(2, 1), optimizer="adam", lr=0.1, loss="mse", betas=(0.8, 0.9))
    assert record(LearningRateMonitor(), model)[0][0] == {"lr": 0.1}
    model = pf.configure(nn.Linear(2, 1), optimizer="adam", lr=0.1, loss="mse", betas=(0.8, 0.9))
    steps, _ = record(LearningRateMonitor(momentum=True, weight_decay=True), model)
    assert steps[0] == {"lr": 0.1, "beta1": 0.8, "beta2": 0.9, "weight_decay": 0.0}


def test_how_often() -> None:
    steps, _ = record(LearningRateMonitor(every=2), Grouped(sgd))
    assert ["lr/0" in logs for logs in steps] == [False, True, False]
    assert steps[1]["lr/0"] == pytest.approx(0.05)


def _on_ranks() -> list[dict[str, float]]:
    return record(LearningRateMonitor(), Grouped(sgd))[0]


def test_ranks_tell_the_same(ranks: Any) -> None:
    first, second = ranks(2, _on_ranks)
    assert first == second
    assert first[2]["lr/1"] == pytest.approx(0.1)
