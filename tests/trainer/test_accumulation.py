"""Accumulation, loss and communication: the right values where other trainers had wrong ones (see each test)."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import paraflow as pf


class Constant(pf.Model):
    """Its gradient is 1 whatever the data, so that a weight counts optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.configure(optimizer="sgd", lr=1.0)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.weight + 0 * batch.sum()


class Slope(pf.Model):
    """The mean of weight × x over all entries, of which each sample has its own number: (sum, count)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.configure(optimizer="sgd", lr=1.0)

    def training_step(self, batch: Any) -> Any:
        x, mask = batch
        return (self.weight * x * mask).sum(), mask.sum()


def step_down(accumulate: int) -> float:
    model = Constant()
    pf.Trainer(accumulate=accumulate, progress=False).fit(model, torch.arange(5.0), batch_size=accumulate)
    return model.weight.item()


def test_last_short_window_is_a_whole_step() -> None:
    """Five micro-batches, two a step, gradient 1: three steps, and the last is not halved."""
    assert step_down(accumulate=2) == -3.0


def test_nothing_is_left_over_at_the_end_of_fit() -> None:
    assert step_down(accumulate=5) == -1.0
    assert step_down(accumulate=3) == -2.0


def slope(accumulate: int) -> float:
    """One sample has 1 token, the other 9; the mean over the ten is 1, the mean of the two means is 5."""
    x = torch.zeros(2, 9)
    mask = torch.zeros(2, 9)
    x[0, 0], mask[0, 0] = 10.0, 1.0
    mask[1] = 1.0
    model = Slope()
    trainer = pf.Trainer(accumulate=accumulate, progress=False)
    history = trainer.fit(model, (x, mask), batch_size=2)
    assert history["loss"] == [0.0]
    return -model.weight.item()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_tokens_weigh_alike_over_micro_batches(accumulate: int) -> None:
    assert slope(accumulate) == pytest.approx(1.0)


def test_tokens_weigh_alike_over_ranks(ranks: Any) -> None:
    assert ranks(2, slope, 1) == pytest.approx([1.0, 1.0])


class LossRecorder(pf.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.losses.append(logs["loss"])


@pytest.mark.parametrize("plan", [{}, {"accumulate": 4}, {"precision": "fp16"}, {"precision": "fp16", "accumulate": 4}])
def test_logged_loss_is_neither_divided_nor_scaled(plan: dict[str, Any]) -> None:
    model = pf.configure(torch.nn.Linear(3, 1), optimizer="sgd", lr=1e-9, loss="mse")
    x, y = torch.randn(8, 3), torch.full((8,), 7.0)
    expected = torch.nn.functional.mse_loss(model(x).squeeze(-1), y).item()
    recorder = LossRecorder()
    history = pf.Trainer(progress=False, callbacks=[recorder], **plan).fit(model, (x, y), batch_size=8)
    assert recorder.losses == pytest.approx([expected], rel=2e-2 if "precision" in plan else 1e-6)
    assert history["loss"] == pytest.approx(recorder.losses)


def local_gradients() -> list[tuple[float, float]]:
    """This rank's gradient after each micro-batch, and that of the optimizer step."""
    seen: list[float] = []
    final: list[float] = []

    class Look(pf.Callback):
        def on_after_backward(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
            seen.append(trainer.engine.parameters[0].grad.item())

        def on_before_optimizer_step(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
            final.append(trainer.engine.parameters[0].grad.item())

    class Own(pf.Model):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))
            self.configure(optimizer="sgd", lr=1.0)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return (self.weight * batch).mean()

    loader = torch.utils.data.DataLoader(torch.tensor([1.0, 1.0, 3.0, 3.0]), batch_size=4)
    pf.Trainer(accumulate=2, progress=False, callbacks=[Look()]).fit(Own(), loader)
    return [(seen[0], final[0])]


def test_micro_batches_before_the_last_do_not_communicate(ranks: Any) -> None:
    """`no_sync` has to cover forward as well: around backward alone it does nothing."""
    assert ranks(2, local_gradients) == [[(0.5, 2.0)], [(1.5, 2.0)]]


def test_validation_inside_a_run_changes_nothing() -> None:
    def train(**options: Any) -> torch.Tensor:
        torch.manual_seed(0)
        body = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        model = pf.configure(body, optimizer="adam", lr=0.1, loss="mse")
        x = torch.arange(30.0).view(10, 3) / 30
        pf.Trainer(max_epochs=3, accumulate=2, progress=False, **options).fit(
            model, (x, x.sum(1)), (x, x.sum(1)), batch_size=4
        )
        assert model.training
        return model[0].weight.detach()

    assert torch.equal(train(val_every=1), train(val_every="9ep"))


def test_no_graph_outlives_its_step() -> None:
    """The last loss and output must not keep activations alive."""

    def living() -> int:
        gc.collect()
        tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
        return sum(tensor.grad_fn is not None for tensor in tensors)

    counts: list[int] = []

    class Count(pf.Callback):
        def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
            counts.append(living())

    before = living()
    model = pf.configure(torch.nn.Linear(3, 2), loss="cross_entropy", metrics=["accuracy"])
    data = (torch.randn(12, 3), torch.zeros(12).long())
    pf.Trainer(max_epochs=2, accumulate=2, progress=False, callbacks=[Count()]).fit(model, data, batch_size=4)
    assert set(counts) == {before}


def test_scalars_beside_the_loss_are_logged_as_weighted_means() -> None:
    class Beside(Slope):
        def training_step(self, batch: Any) -> Any:
            x, _ = batch
            return {"loss": super().training_step(batch), "largest": x.max(), "rows": float(len(x))}

    x, mask = torch.tensor([[1.0, 5.0], [7.0, 0.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, mask), batch_size=2)
    history = pf.Trainer(accumulate=2, progress=False).fit(Beside(), loader)
    assert history["largest"] == pytest.approx([(5.0 * 2 + 7.0 * 1) / 3])
    assert history["rows"] == [1.0]


def half_precision_windows(plan: dict[str, Any]) -> bool:
    """A first window of one item, then windows of a thousand: gradients must stay in sixteen bits' range."""
    torch.manual_seed(0)

    class Items(pf.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
            self.configure(optimizer="sgd", lr=1e-3)

        def training_step(self, batch: Any) -> Any:
            x, kept = batch
            return (100 * self.layer(x).squeeze(-1) ** 2 * kept).sum(), kept.sum()

    x, kept = torch.randn(24, 1000, 4, generator=torch.Generator().manual_seed(0)), torch.ones(24, 1000)
    kept[:8] = 0.0
    kept[0, 0] = 1.0
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, kept), batch_size=8)
    model = Items()
    history = pf.Trainer(accumulate=2, progress=False, **plan).fit(model, loader)
    return bool(torch.isfinite(model.layer.weight).all()) and history["loss"][0] > 0


@pytest.mark.parametrize("plan", [{"comm_hook": "fp16"}, {"precision": "fp16"}])
def test_windows_of_very_different_sizes_stay_in_range(ranks: Any, plan: dict[str, Any]) -> None:
    assert ranks(2, half_precision_windows, plan) == [True, True]


def test_a_loss_that_is_not_finite_is_said() -> None:
    model = pf.configure(torch.nn.Linear(1, 1), optimizer="sgd", lr=1e30, loss="mse")
    with pytest.warns(UserWarning, match="The loss of the epoch is (nan|inf)"):
        pf.Trainer(progress=False).fit(model, (torch.ones(8, 1), torch.ones(8)), batch_size=2)
