"""Small trainings whose right outcome is known by hand, on two ranks or in windows that do not come out even."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from fault_jobs import Row
from torch import nn
from torch.nn import functional

import paraflow as pf


class Slope(pf.Model):
    """One weight, whose gradient is the mean of the data; its loss in evaluation is that mean."""

    def __init__(self, lr: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.configure(optimizer="sgd", lr=lr)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.weight * batch.mean()

    def validation_step(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.mean()


class Tokens(pf.Model):
    """One weight, whose gradient is the mean of x over all tokens there are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.configure(optimizer="sgd", lr=1.0)

    def training_step(self, batch: Any) -> Any:
        x, mask = batch
        return (self.weight * x * mask).sum(), mask.sum()


class Counts(pf.Model):
    """A weight for each sample: a step adds to it the sample's share of the global batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(24))
        self.configure(optimizer="sgd", lr=1.0)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return -self.weight[batch].mean()


@dataclass(frozen=True)
class Batch:
    """A batch that cannot be changed."""

    input: torch.Tensor
    labels: torch.Tensor


def mean_of_five() -> float:
    """0, 1, 2, 3 and 8; padded to six samples on two ranks the mean is another."""
    values = torch.tensor([0.0, 1.0, 2.0, 3.0, 8.0])
    return pf.Trainer(progress=False).evaluate(Slope(), values, batch_size=2)["loss"]


def accumulated() -> float:
    """Five batches of gradient 1, two a step: three whole steps."""
    model = Slope()
    pf.Trainer(accumulate=2, progress=False).fit(model, torch.ones(5), batch_size=2)
    return model.weight.item()


def tokens(accumulate: int) -> float:
    """One sample has one token of 10, the other nine of 0: the mean of the ten is 1, that of the two means 5."""
    x, mask = torch.zeros(2, 9), torch.zeros(2, 9)
    x[0, 0], mask[0, 0], mask[1] = 10.0, 1.0, 1.0
    model = Tokens()
    pf.Trainer(accumulate=accumulate, progress=False).fit(model, (x, mask), batch_size=2)
    return -model.weight.item()


def five_and_seven() -> list[float]:
    """Rank 0 has five batches of two samples, rank 1 seven: 24 samples, each with a weight."""
    first = 10 * pf.rank()
    batches = [torch.tensor([first + 2 * i, first + 2 * i + 1]) for i in range(5 + 2 * pf.rank())]
    model = Counts()
    pf.Trainer(progress=False).fit(model, pf.data.PerRank(batches))
    weights: list[float] = model.weight.tolist()
    return weights


def trained() -> torch.Tensor:
    """All weights of a small network after 40 steps of AdamW over 195 samples, 16 a step over all ranks."""
    pf.seed(3)
    net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(195, 6, generator=generator), torch.randint(0, 4, (195,), generator=generator)
    pf.configure(net, optimizer="adamw", lr=1e-2, loss="cross_entropy")
    pf.Trainer(max_steps=40, max_epochs=9, progress=False).fit(net, data, batch_size=16)
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def said_of_nan() -> tuple[str, str]:
    """What is said of a loss that is NaN, without a guard and with one."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.log(self.first(x) * 0 - 1)).squeeze(-1)

    def train(*callbacks: pf.Callback) -> None:
        net = pf.configure(Broken(), optimizer="sgd", lr=0.1, loss="mse")
        pf.Trainer(progress=False, callbacks=callbacks).fit(net, (torch.ones(8, 3), torch.ones(8)), batch_size=4)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train()
    warned = next((str(warning.message) for warning in caught if "loss" in str(warning.message)), "")
    try:
        train(pf.callbacks.NaNGuard())
    except pf.ParaflowError as error:
        return warned, str(error)
    return warned, ""


def frozen_batch() -> float:
    """How far training on a frozen dataclass is from training on a tuple."""
    x, y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2

    def train(data: Any) -> torch.Tensor:
        pf.seed(0)
        net = pf.configure(nn.Linear(3, 2), optimizer="sgd", lr=0.1, loss=functional.cross_entropy)
        pf.Trainer(progress=False).fit(net, data, batch_size=4)
        return net.weight.detach()

    return float((train((x, y)) - train(Batch(x, y))).abs().max())


def _alike(ranks: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns on all ranks; all must return the same."""
    if ranks == 1:
        return function(*arguments)
    first, *others = pf.spawn(function, ranks, arguments)
    assert all(torch.equal(torch.as_tensor(first), torch.as_tensor(other)) for other in others)
    return first


def values() -> list[Row]:
    """All of them."""
    rows = []

    def add(test: str, began: float, result: str, right: bool) -> None:
        rows.append(Row(test, result, f"{time.monotonic() - began:.1f}", right))

    began, mean = time.monotonic(), _alike(2, mean_of_five)
    add("mean over 5 samples on 2 ranks (2.8)", began, f"{mean:.6g}", abs(mean - 2.8) < 1e-6)
    began, weight = time.monotonic(), _alike(1, accumulated)
    add("accumulation 2 over 5 batches (−3)", began, f"{weight:g}", weight == -3)
    began = time.monotonic()
    means = [_alike(1, tokens, 2), _alike(2, tokens, 1)]
    add(
        "gradient over 1 + 9 tokens, 2 micro-batches, 2 ranks (1)",
        began,
        " and ".join(f"{mean:g}" for mean in means),
        all(abs(mean - 1) < 1e-6 for mean in means),
    )
    began, weights = time.monotonic(), _alike(2, five_and_seven)
    seen = sum(weight > 0 for weight in weights)
    # Five steps of four samples, two of the last two: a sample's share of its step.
    expected = [0.25] * 20 + [0.5] * 4
    add("5 and 7 batches on 2 ranks", began, f"{seen} of 24 samples seen, each once", weights == expected)
    began = time.monotonic()
    difference = float((_alike(1, trained) - _alike(2, trained)).abs().max())
    add("1 process against 2, same global batch", began, f"largest difference {difference:.1e}", difference < 1e-5)
    began, (warned, guarded) = time.monotonic(), said_of_nan()
    right = "loss of the epoch is nan" in warned and "step 1 is not finite" in guarded
    add("loss becomes NaN", began, f"said: {warned.split(';')[0]!r}; NaNGuard names the step", right)
    began, difference = time.monotonic(), frozen_batch()
    add(
        "frozen dataclass batch",
        began,
        "works, as a tuple does" if difference == 0 else f"{difference}",
        difference == 0,
    )
    return rows
