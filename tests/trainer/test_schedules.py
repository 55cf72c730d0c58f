"""Schedules and half precision: one scheduler step an optimizer step, none for a step that is left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paraflow as pf


class Rates(pf.Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []
        self.norms: list[float] = []

    def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.rates.append(logs["lr"])
        if "grad_norm" in logs:
            self.norms.append(logs["grad_norm"])


def net(**recipe: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return pf.configure(torch.nn.Linear(3, 1), **{"optimizer": "sgd", "lr": 0.1, "loss": "mse", **recipe})


DATA = (torch.arange(24.0).view(8, 3) / 24, torch.ones(8))


def rates(**plan: Any) -> list[float]:
    recorder = Rates()
    model = net(schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5))
    pf.Trainer(max_epochs=3, progress=False, callbacks=[recorder], **plan).fit(model, DATA, batch_size=4)
    return recorder.rates


EXPECTED = [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]


@pytest.mark.parametrize("plan", [{}, {"accumulate": 2}, {"precision": "bf16"}])
def test_one_scheduler_step_an_optimizer_step(plan: dict[str, Any]) -> None:
    assert rates(**plan) == pytest.approx(EXPECTED)


def test_one_scheduler_step_an_optimizer_step_on_two_ranks(ranks: Any) -> None:
    assert ranks(2, rates, accumulate=2) == [pytest.approx(EXPECTED)] * 2


def test_a_named_schedule_knows_the_run() -> None:
    recorder = Rates()
    model = net(schedule="linear")
    pf.Trainer(max_epochs=2, progress=False, callbacks=[recorder]).fit(model, DATA, batch_size=4)
    assert recorder.rates == pytest.approx([0.1, 0.075, 0.05, 0.025])
    recorder = Rates()
    pf.Trainer(max_epochs=9, max_steps=4, progress=False, callbacks=[recorder]).fit(model, DATA, batch_size=4)
    assert recorder.rates == pytest.approx([0.1, 0.075, 0.05, 0.025])


def test_a_named_schedule_over_data_without_length_needs_max_steps() -> None:
    def batches() -> Any:
        yield from [(DATA[0], DATA[1])] * 3

    with pytest.raises(pf.ModelError, match="max_steps"):
        pf.Trainer(progress=False).fit(net(schedule="cosine"), batches)
    history = pf.Trainer(max_steps=2, progress=False).fit(net(schedule="cosine"), batches)
    assert len(history) == 1


def overflowing() -> tuple[list[float], list[float], int]:
    """The first loss scale is too large for fp16, so the first steps are left out."""
    recorder = Rates()
    steps = 0

    class Steps(pf.Callback):
        def on_before_optimizer_step(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
            nonlocal steps
            steps += 1

    model = net(schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    trainer = pf.Trainer(
        max_steps=6,
        max_epochs=3,
        clip_norm=float("inf"),
        progress=False,
        callbacks=[recorder, Steps()],
        plugins=[pf.plugins.Precision("fp16", initial_scale=2.0**19)],
    )
    trainer.fit(model, DATA, batch_size=4)
    return recorder.rates, recorder.norms, steps


def test_a_step_that_is_left_out_moves_no_schedule(ranks: Any) -> None:
    for rates_seen, norms, steps in [overflowing(), *ranks(2, overflowing)]:
        assert 0 < steps < 6
        assert rates_seen[: 6 - steps + 1] == pytest.approx([0.1] * (6 - steps + 1))
        assert rates_seen[-1] == pytest.approx(0.1 * 0.5 ** (steps - 1))
        assert len(norms) == steps


@pytest.mark.parametrize("scale", [1.0, 2.0**10])
def test_norm_and_clipping_do_not_see_the_loss_scale(scale: float) -> None:
    recorder, plain = Rates(), Rates()
    pf.Trainer(
        clip_norm=0.01,
        progress=False,
        callbacks=[recorder],
        plugins=[pf.plugins.Precision("fp16", initial_scale=scale)],
    ).fit(net(), DATA, batch_size=8)
    pf.Trainer(clip_norm=0.01, progress=False, callbacks=[plain]).fit(net(), DATA, batch_size=8)
    assert recorder.norms == pytest.approx(plain.norms, rel=1e-2)


def test_optimizer_and_schedule_by_method() -> None:
    class Own(pf.Model):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Linear(3, 1)
            self.configure(loss="mse")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.4)
            return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)

    recorder = Rates()
    pf.Trainer(max_epochs=1, progress=False, callbacks=[recorder]).fit(Own(), DATA, batch_size=4)
    assert recorder.rates == pytest.approx([0.4, 0.2])


def test_bf16_keeps_parameters_and_optimizer_in_fp32() -> None:
    model = net(optimizer="adamw")
    trainer = pf.Trainer(precision="bf16", progress=False)
    trainer.fit(model, DATA)
    state = trainer.engine.state_dict()
    assert {tensor.dtype for tensor in state["model"].values()} == {torch.float32}
    moments = [values["exp_avg"].dtype for values in state["optimizer"]["state"].values()]
    assert set(moments) == {torch.float32}
