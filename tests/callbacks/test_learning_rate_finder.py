from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import paraflow as pf
from paraflow.callbacks.learning_rate_finder import LearningRateFinder
from paraflow.callbacks.range_test import Smoothed, has_diverged, rates, steepest
from paraflow.optim.base_rate import set_base_rate
from tests.callbacks.traces import arrays, difference, left_by, network
from tests.pool import Pool

PLANS: list[dict[str, Any]] = [
    {},
    {"precision": "fp16"},
    {"accumulate": 2, "clip_norm": 0.5},
    {"data": "dataset"},
]


def _with_and_without(plan: dict[str, Any]) -> tuple[str, list[float]]:
    finder = LearningRateFinder(low=1e-4, high=100.0, steps=30)
    with_it, without = left_by([finder], **plan), left_by([], **plan)
    return difference(with_it, without), finder.curve["smoothed"]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: "-".join(plan) or "plain")
def test_no_trace_is_left(ranks: Pool, world_size: int, plan: dict[str, Any]) -> None:
    results = ranks(world_size, _with_and_without, plan)
    assert all(result == results[0] for result in results)
    where, losses = results[0]
    assert where == ""
    assert len(losses) > 10
    assert losses[0] != losses[-1], "it did not train"


def test_the_comparison_sees_a_trace() -> None:
    class Draws(pf.Callback):
        def on_train_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
            torch.rand(())

    assert "generators" in difference(left_by([Draws()]), left_by([]))


class Parabola(nn.Module):
    """One weight w from 0, and the loss (w − 1)² whatever the data: descent at rate r makes 1 − w (1 − 2r)-fold."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.scale = scale

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.scale * (self.w - 1) ** 2


def find(model: nn.Module, data: Any = None, **options: Any) -> tuple[LearningRateFinder, str]:
    out = io.StringIO()
    finder = LearningRateFinder(**options)
    trainer = pf.Trainer(max_steps=1, callbacks=[finder])
    trainer.console = Console(file=out, width=300)
    trainer.fit(model, arrays(8) if data is None else data, **({} if data is not None else {"batch_size": 4}))
    return finder, next(line for line in out.getvalue().splitlines() if line.startswith("learning rate"))


def test_losses_are_those_of_descent_at_rising_rates() -> None:
    finder, line = find(pf.configure(Parabola(), optimizer="sgd", lr=0.3), low=1e-3, high=1e2, steps=26)
    distance, expected, tried = 1.0, [], rates(1e-3, 1e2, 26)
    for rate in tried:
        expected.append(distance**2)
        distance *= 1 - 2 * rate
    count = len(finder.curve["lr"])
    assert finder.curve["lr"] == tried[:count]
    assert finder.curve["loss"] == pytest.approx(expected[:count], rel=1e-3, abs=1e-6)
    assert count < 26, "it went on after the loss had diverged"
    assert has_diverged(finder.curve["smoothed"], 4)
    assert not has_diverged(finder.curve["smoothed"][:-1], 4)
    # Descent is fast from 0.1, where a fifth of the way is left behind in each step, and diverges from 1 on.
    assert finder.suggestion is not None
    assert 0.01 < finder.suggestion < 1
    assert f"{finder.suggestion:.2e} suggested" in line
    assert f"in {count} steps; they read {math.ceil(count / 2)} epochs" in line


def test_a_step_that_fp16_leaves_out_is_made_again() -> None:
    finder = LearningRateFinder(low=0.1, high=0.4, steps=10)
    # The gradient, -2, times 2^127 overflows; half of that does not.
    plugin = pf.plugins.Precision("fp16", initial_scale=2.0**127)
    trainer = pf.Trainer(max_steps=1, callbacks=[finder], plugins=[plugin], progress=False)
    trainer.fit(pf.configure(Parabola(), optimizer="sgd", lr=0.1), arrays(8), batch_size=4)
    assert finder.curve["loss"][:2] == pytest.approx([1.0, 0.8**2], rel=1e-3)


def test_the_steepest_point_of_a_curve_by_hand() -> None:
    tried = rates(1e-4, 1e2, 25)  # four a decade; the loss falls by 1 a decade, by 4 between 1e-1 and 1, then rises
    decades = [math.log10(rate) for rate in tried]
    losses = [10 - (d + 4) if d <= -1 else 7 - 4 * (d + 1) if d <= 0 else 3 + 5 * d for d in decades]
    found, why = steepest(tried, losses)
    assert why == ""
    assert found is not None
    assert 10 ** (-0.80) < found < 10 ** (-0.20)


@pytest.mark.parametrize(
    ("losses", "sentence"),
    [
        ([2.0, 2.0, 2.01, 2.0, 1.995] * 4, "never fell"),
        ([1.0, 2.0, 4.0, 8.0, 16.0, 32.0], "never fell"),
        ([1.0, 0.9, 2.0, 4.0, 8.0, 16.0], "rose from the beginning"),
        ([1.0, math.nan], "finite for only 1 step"),
        ([math.nan], "finite for only 0 steps"),
        ([1.0, math.inf, 0.5, 0.4, 0.3, 0.2, 0.1], "finite for only 1 step"),
    ],
)
def test_a_curve_that_says_nothing_has_no_suggestion(losses: list[float], sentence: str) -> None:
    found, why = steepest(rates(1e-3, 1.0, len(losses) + 1)[: len(losses)], losses)
    assert found is None
    assert sentence in why


def test_a_negative_loss_may_fall() -> None:
    assert not has_diverged([-1.0, -2.0, -3.0], 4)
    assert not has_diverged([-3.0, -1.0], 4)
    assert has_diverged([-3.0, 6.5], 4)


def test_smoothing_by_hand() -> None:
    average = Smoothed()
    assert average.add(1.0) == pytest.approx(1.0)
    assert average.add(3.0) == pytest.approx((0.09 * 1 + 0.1 * 3) / 0.19)
    assert average.add(5.0) == pytest.approx((0.081 * 1 + 0.09 * 3 + 0.1 * 5) / 0.271)


def test_nothing_is_suggested_for_a_flat_or_exploding_loss() -> None:
    finder, line = find(pf.configure(Parabola(scale=0.0), optimizer="sgd", lr=0.1), steps=20)
    assert finder.suggestion is None
    assert "no suggestion, for the loss never fell" in line
    finder, line = find(pf.configure(Parabola(scale=1e30), optimizer="sgd", lr=0.1), steps=20)
    assert finder.suggestion is None
    assert "no suggestion, for the loss was finite for only" in line
    assert len(finder.curve["lr"]) < 5


def test_the_suggestion_is_applied_where_it_is_asked_for() -> None:
    model = network(weight_decay=0.1)  # two groups
    finder = LearningRateFinder(low=1e-4, high=10.0, steps=40, apply=True)
    trainer = pf.Trainer(max_steps=4, callbacks=[finder, pf.callbacks.LambdaCallback(on_step_end=_note)])
    seen.clear()
    trainer.progress = False
    trainer.fit(model, arrays(), batch_size=8)
    assert finder.suggestion is not None
    peak = finder.suggestion
    # Two steps of warmup: 1/3, 2/3 of the peak; then half a cosine over what is left of the four.
    assert seen == pytest.approx([peak / 3, 2 * peak / 3, peak, peak / 2])
    assert [group["initial_lr"] for group in trainer.engine.optimizer.param_groups] == [peak, peak]


seen: list[float] = []


def _note(trainer: pf.Trainer, logs: dict[str, Any]) -> None:
    seen.append(logs["lr"])


def test_groups_keep_their_ratio_and_schedules_their_shape() -> None:
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.02}])
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 2),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        ],
        [2],
    )
    set_base_rate(optimizer, schedule, 1.0)
    lrs = []
    for _ in range(4):
        lrs.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    for row, first in zip(lrs, [0.5, 0.5, 1.0, 0.5], strict=True):
        assert row == pytest.approx([first, 0.2 * first])


def test_the_peak_of_one_cycle_is_its_base() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=20)
    set_base_rate(optimizer, schedule, 3.0)
    lrs = []
    for _ in range(20):
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert max(lrs) == pytest.approx(3.0, rel=1e-2)
    assert lrs[0] == pytest.approx(3.0 / 25)


def test_a_schedule_that_ends_does_not_end_the_test() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=2)
    pf.configure(model, optimizer=optimizer, schedule=schedule, loss="cross_entropy")
    finder, _ = find(model, steps=20)
    assert len(finder.curve["lr"]) > 2
    assert schedule.last_epoch == 1


def test_a_resumed_run_is_not_tested(tmp_path: Path) -> None:
    saving = pf.callbacks.Checkpoint(tmp_path)
    finder = LearningRateFinder(low=1e-4, steps=40, apply=True)
    first = pf.Trainer(max_epochs=1, callbacks=[finder, saving], progress=False)
    first.fit(network(schedule=None, warmup=0), arrays(), batch_size=8)
    again = LearningRateFinder(low=1e-4, steps=40, apply=True)
    trainer = pf.Trainer(max_epochs=2, callbacks=[again, saving], progress=False)
    trainer.fit(network(schedule=None, warmup=0), arrays(), batch_size=8, resume=tmp_path)
    assert again.curve["lr"] == []
    assert finder.suggestion is not None
    assert trainer.engine.lr == finder.suggestion


def test_an_iterator_is_left_alone() -> None:
    x, y = arrays(8)
    finder, line = find(pf.configure(nn.Linear(4, 3), loss="cross_entropy"), iter([(x, y), (x, y)]))
    assert finder.suggestion is None
    assert "can be read only once" in line


def test_a_list_of_batches_is_read_again() -> None:
    x, y = arrays(8)
    finder, line = find(pf.configure(nn.Linear(4, 3), optimizer="sgd", loss="cross_entropy"), [(x, y), (x, y)])
    assert len(finder.curve["lr"]) > 10
    assert "epochs of the data" in line


def _drawn_on_ranks(folder: str) -> tuple[list[float], float | None]:
    finder = LearningRateFinder(low=1e-4, steps=40, folder=folder)
    pf.Trainer(max_steps=1, callbacks=[finder], progress=False).fit(network(), arrays(), batch_size=8)
    return finder.curve["loss"], finder.suggestion


def test_a_picture_is_drawn_once(ranks: Pool, tmp_path: Path) -> None:
    one, other = ranks(2, _drawn_on_ranks, str(tmp_path))
    assert one == other
    assert [path.name for path in tmp_path.iterdir()] == ["learning-rate.png"]
    assert (tmp_path / "learning-rate.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"low": 1.0, "high": 0.1}, "low and high must be rates above 0"),
        ({"low": 0.0}, "low and high must be rates above 0"),
        ({"steps": 5}, "steps must be a whole number of at least 10, not 5"),
        ({"stop_factor": 1}, "stop_factor must be above 1, not 1"),
    ],
)
def test_arguments_of_another_kind_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        LearningRateFinder(**options)
