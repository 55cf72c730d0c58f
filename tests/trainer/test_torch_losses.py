"""torch's own losses under every division: a mean is weighed by what it averages, and what is no mean is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import paraflow as pf

X = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 1, 2, 0, 1, 2, 2, 2, 0, 1, 1, 0])
MASKED = CLASSES.clone()
MASKED[::4] = -100
SOFT = torch.softmax(torch.randn(12, 3, generator=torch.Generator().manual_seed(1)), 1)
WEIGHTS = torch.tensor([0.2, 1.0, 3.0])


class LogProbabilities(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).log_softmax(1)


def linear() -> nn.Module:
    return nn.Linear(5, 3)


LOSSES: dict[str, tuple[Any, torch.Tensor, Callable[[], nn.Module]]] = {
    "cross-entropy": (nn.CrossEntropyLoss(), CLASSES, linear),
    "with class weights": (nn.CrossEntropyLoss(weight=WEIGHTS), CLASSES, linear),
    "with masked targets": (nn.CrossEntropyLoss(), MASKED, linear),
    "weights, masks, smoothing": (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), MASKED, linear),
    "another ignored class": (nn.CrossEntropyLoss(ignore_index=2), CLASSES, linear),
    "soft targets": (nn.CrossEntropyLoss(), SOFT, linear),
    "as a function": (functional.cross_entropy, MASKED, linear),
    "nll": (nn.NLLLoss(weight=WEIGHTS), MASKED, LogProbabilities),
    "nll by name": ("nll", MASKED, LogProbabilities),
    "mse": (nn.MSELoss(), torch.randn(12, 3, generator=torch.Generator().manual_seed(2)), linear),
    "bce with whole numbers": (nn.BCEWithLogitsLoss(), nn.functional.one_hot(CLASSES, 3), linear),
}


def train(name: str, accumulate: int) -> tuple[float, torch.Tensor]:
    loss, target, build = LOSSES[name]
    torch.manual_seed(0)
    model = pf.configure(build(), optimizer="sgd", lr=1.0, loss=loss)
    history = pf.Trainer(accumulate=accumulate, progress=False).fit(model, (X, target), batch_size=12)
    return history["loss"][0], next(model.parameters()).detach()


def by_hand(name: str) -> tuple[float, torch.Tensor]:
    loss, target, build = LOSSES[name]
    torch.manual_seed(0)
    model = build()
    function = nn.NLLLoss() if loss == "nll" else loss
    value = function(model(X), target.float() if isinstance(loss, nn.BCEWithLogitsLoss) else target)
    value.backward()
    weight = next(model.parameters())
    return value.item(), (weight - weight.grad).detach()


@pytest.mark.parametrize("name", LOSSES)
def test_every_division_gives_the_whole_batchs_mean(ranks: Any, name: str) -> None:
    value, weight = by_hand(name)
    for mine, trained in [train(name, 1), train(name, 3), *ranks(2, train, name, 2)]:
        assert mine == pytest.approx(value, rel=1e-5)
        torch.testing.assert_close(trained, weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", [nn.MSELoss(reduction="sum"), nn.CrossEntropyLoss(reduction="none")])
def test_what_is_no_mean_is_refused(loss: nn.Module) -> None:
    with pytest.raises(pf.ModelError, match=r"reduction='(sum|none)'\) is no mean.*\(sum, count\)"):
        pf.Trainer(progress=False).fit(pf.configure(linear(), loss=loss), (X, CLASSES))


def test_a_loss_with_parameters_is_refused() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return self.scale * functional.cross_entropy(output, target)

    with pytest.raises(pf.ModelError, match="Learned has parameters of its own"):
        pf.Trainer(progress=False).fit(pf.configure(linear(), loss=Learned()), (X, CLASSES))


@pytest.mark.parametrize("target", [CLASSES.int(), CLASSES[:, None], nn.functional.one_hot(CLASSES, 3)])
def test_classes_may_come_as_other_integers_or_one_hot(target: torch.Tensor) -> None:
    model = pf.configure(linear(), loss="cross_entropy")
    expected = functional.cross_entropy(model(X), CLASSES).item()
    result = pf.Trainer(progress=False).evaluate(model, (X, target))
    assert result["loss"] == pytest.approx(expected, rel=1e-5)


def test_float_classes_are_refused_with_what_to_write() -> None:
    with pytest.raises(pf.ModelError, match=r"target \(12,\) of torch\.float32.*target\.long\(\)"):
        pf.Trainer(progress=False).fit(pf.configure(linear(), loss="cross_entropy"), (X, CLASSES.float()))


class Empty(pf.Model):
    """A mean over unmasked items, of which the first micro-batch has none."""

    def __init__(self, with_output: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 1)
        self.with_output = with_output
        self.configure(optimizer="sgd", lr=1.0)

    def training_step(self, batch: Any) -> Any:
        x, kept = batch
        output = self.layer(x).squeeze(1)
        mean = (output**2 * kept).sum() / kept.sum()
        return {"loss": mean, "weight": kept.sum(), **({"output": output} if self.with_output else {})}


def test_a_mean_over_nothing_leaves_no_nan() -> None:
    kept = torch.tensor([0.0] * 6 + [1.0] * 6)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, kept), batch_size=12)
    model, fresh = Empty(with_output=True), Empty(with_output=True)
    pf.Trainer(accumulate=2, progress=False).fit(model, data)
    fresh.training_step((X, kept))["loss"].backward()
    torch.testing.assert_close(model.layer.weight, fresh.layer.weight - fresh.layer.weight.grad)
    with pytest.raises(pf.ModelError, match=r"had 0 items.*\(sum, count\)"):
        pf.Trainer(accumulate=2, progress=False).fit(Empty(with_output=False), data)


def test_probabilities_are_not_taken_for_logits() -> None:
    class Sigmoid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).sigmoid().squeeze(1)

    target = (X[:, 0] > 0).float()
    model = pf.configure(Sigmoid(), loss=nn.BCELoss(), metrics=["accuracy"])
    expected = ((model(X) > 0.5).float() == target).float().mean().item()
    assert pf.Trainer(progress=False).evaluate(model, (X, target))["accuracy"] == pytest.approx(expected)
