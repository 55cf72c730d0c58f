"""The step at which a run stops, and what it is left with, are those that one finds by hand: two steps an epoch."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import paraflow as pf
from paraflow.callbacks import Checkpoint, LambdaCallback
from paraflow.callbacks.early_stopping import EarlyStopping
from tests.callbacks.runs import Scripted, linear, samples
from tests.plugins.toy_shard import ToyShard

VAL = samples(4)


def fit(
    values: list[float], stopping: EarlyStopping, epochs: int = 9, name: str = "loss", **options: Any
) -> pf.Trainer:
    resume, extra = options.pop("resume", None), options.pop("callbacks", [])
    trainer = pf.Trainer(max_epochs=epochs, callbacks=[stopping, *extra], **{"progress": False, **options})
    trainer.fit(Scripted(values, name), samples(8), VAL, batch_size=4, resume=resume)
    return trainer


@pytest.mark.parametrize(
    ("values", "options", "stopped", "best"),
    [
        ([5, 4, 3, 2, 1], {"patience": 1}, None, 1),
        ([5, 4, 4, 3, 2], {"patience": 1}, 6, 4),  # the same is not better
        ([5, 6, 7, 4, 5, 6, 7, 8], {"patience": 3}, 14, 4),
        ([5, 6, 7, 8, 1], {"patience": 3}, 8, 5),
        ([1, 2, 3], {"patience": 2}, 6, 1),
        ([5, 4.95, 4.9, 4.85], {"patience": 2, "min_delta": 0.2}, 6, 5),
        ([5, 4.75, 4.5, 4.25], {"patience": 2, "min_delta": 0.2}, None, 4.25),
        ([3, math.nan, math.nan, 1], {"patience": 2}, 6, 3),
        ([math.nan, math.nan, 3], {"patience": 2}, 4, None),
        ([math.nan, 3, 4, 2], {"patience": 2}, None, 2),
        ([3, math.nan, 1], {"stop_on_nan": True}, 4, 3),
        ([3, math.inf, 1], {"stop_on_nan": True}, 4, 3),
        ([5, 3, 2, 1], {"target": 2.0}, 6, 2),
        ([1, 2, 3, 4, 5], {"patience": 1, "warmup": 3}, 8, 1),
        ([1, 2, 3, 0.5, 4], {"patience": 1, "warmup": 3}, 10, 0.5),
    ],
)
def test_where_it_stops(values: list[float], options: Any, stopped: int | None, best: float | None) -> None:
    stopping = EarlyStopping(**options)
    trainer = fit([float(value) for value in values], stopping, epochs=len(values))
    assert stopping.stopped_step == stopped
    assert trainer.step == (stopped or 2 * len(values))
    assert stopping.best == best
    assert stopping.best_step == (None if best is None else 2 * ([float(v) for v in values].index(best) + 1))


@pytest.mark.parametrize(("name", "mode", "stopped"), [("accuracy", None, 8), ("error", "max", 8), ("error", None, 4)])
def test_which_way_is_better(name: str, mode: Any, stopped: int) -> None:
    stopping = EarlyStopping(f"val_{name}", mode=mode, patience=1)
    assert fit([0.25, 0.5, 0.75, 0.5, 0.5], stopping, 5, name).step == stopped
    assert EarlyStopping(f"val_{name}", mode=mode, target=0.5, patience=9).monitor.mode == stopping.monitor.mode


def test_a_target_is_reached_from_below() -> None:
    assert fit([0.25, 0.5, 0.75], EarlyStopping("val_accuracy", target=0.5), 3, "accuracy").step == 4


def test_validations_within_an_epoch_count_each_once() -> None:
    # Steps 1, 2, 3, ...: better, worse, worse. The second is at an epoch's end, where two events tell of it.
    stopping = EarlyStopping(patience=2)
    assert fit([1.0, 2.0, 3.0, 4.0], stopping, val_every=1).step == 3
    assert (stopping.best, stopping.best_step, stopping.wait) == (1.0, 1, 2)


def test_epochs_without_validation_do_not_count() -> None:
    stopping = EarlyStopping(patience=1)
    assert fit([1.0, 2.0, 3.0], stopping, val_every="2ep").step == 8
    assert stopping.best_step == 4


def test_training_can_be_monitored() -> None:
    stopping = EarlyStopping("loss", patience=1, min_delta=100.0)
    trainer = pf.Trainer(max_epochs=5, callbacks=[stopping], progress=False)
    history = trainer.fit(linear(), samples(8), batch_size=4)
    assert trainer.step == 4
    assert stopping.best == history["loss"][0]


def test_other_data_that_a_callback_evaluates_does_not_count() -> None:
    # Validation is due at steps 3 and 6, and gives 5 and 7; after each step the callback evaluates for itself.
    evaluating = LambdaCallback(on_checkpoint=lambda trainer, logs: trainer.evaluate(trainer.engine.module, VAL))
    stopping = EarlyStopping(patience=9)
    fit([0.1, 0.2, 5.0, 0.3, 0.4, 0.5, 7.0, 0.6], stopping, 3, val_every=3, callbacks=[evaluating])
    assert (stopping.best, stopping.best_step, stopping.wait) == (5.0, 3, 1)


def test_evaluating_after_the_run_does_not_count() -> None:
    stopping = EarlyStopping(patience=1)
    trainer = fit([1.0, 0.5], stopping, 1, val_every=2)
    trainer.evaluate(trainer.engine.module, VAL)
    assert (stopping.best, stopping.wait) == (1.0, 0)


@pytest.mark.parametrize("monitor", ["val_acc", "accuracy"])
def test_a_monitor_that_nothing_measures_is_refused(monitor: str) -> None:
    with pytest.raises(pf.ParaflowError, match=rf"Nothing measures '{monitor}'; there is .*val_loss"):
        fit([1.0] * 9, EarlyStopping(monitor))


def test_monitoring_validation_without_validation_data_is_refused() -> None:
    with pytest.raises(pf.ParaflowError, match="EarlyStopping monitors 'val_loss', and fit was given no validation"):
        pf.Trainer(callbacks=[EarlyStopping()], progress=False).fit(linear(), samples(8), batch_size=4)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mode": "best"}, "mode must be 'min' or 'max', not 'best'"),
        ({"patience": 0}, "patience must be a whole number of at least 1, not 0"),
        ({"patience": 1.5}, r"patience must be a whole number of at least 1, not 1\.5"),
        ({"warmup": -1}, "warmup must be a whole number of at least 0, not -1"),
        ({"min_delta": -0.1}, r"min_delta must be at least 0, not -0\.1"),
    ],
)
def test_arguments_of_another_kind_are_refused(options: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        EarlyStopping(**options)


def weights_by_step(trainer_callbacks: list[Any]) -> dict[int, torch.Tensor]:
    kept: dict[int, torch.Tensor] = {}
    trainer_callbacks.append(
        LambdaCallback(
            on_checkpoint=lambda trainer, logs: kept.update(
                {trainer.step: trainer.engine.module.state_dict()["linear.weight"].clone()}
            )
        )
    )
    return kept


@pytest.mark.parametrize(
    ("values", "epochs", "best"),
    [([3.0, 1.0, 2.0, 4.0, 9.0], 9, 4), ([3.0, 1.0, 2.0], 3, 4), ([3.0, 2.0, 1.0], 3, 6), ([math.nan] * 3, 3, 4)],
)
def test_the_best_weights_are_put_back_early_or_not(values: list[float], epochs: int, best: int) -> None:
    callbacks: list[Any] = []
    kept = weights_by_step(callbacks)
    trainer = fit(values, EarlyStopping(patience=2, restore_best=True), epochs, callbacks=callbacks)
    assert torch.equal(trainer.engine.module.state_dict()["linear.weight"], kept[best])
    assert all(not torch.equal(kept[best], other) for step, other in kept.items() if step != best)


@pytest.mark.parametrize(("last", "best"), [(0.5, 3), (1.5, 2)])
def test_the_last_weights_stay_if_they_are_the_best(last: float, best: int) -> None:
    # The run ends within its second epoch, and validates there: that is not counted, but it is known.
    callbacks: list[Any] = []
    kept = weights_by_step(callbacks)
    stopping = EarlyStopping(restore_best=True)
    trainer = fit([1.0, last], stopping, max_steps=3, callbacks=callbacks)
    assert torch.equal(trainer.engine.module.state_dict()["linear.weight"], kept[best])
    assert (stopping.best, stopping.wait) == (1.0, 0)


@pytest.mark.parametrize("val_every", ["1ep", 1, 3])
@pytest.mark.parametrize("cut", [1, 2, 3, 5, 6])
def test_a_resumed_run_decides_as_one_that_never_stopped(tmp_path: Path, cut: int, val_every: Any) -> None:
    by_step = dict(enumerate([9.0, 3.0, 2.0, 2.5, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0], 1))

    class ByStep(Scripted):
        trainer: Any

        def validation_step(self, batch: Any) -> Any:
            return {"loss": torch.tensor(by_step[self.trainer.step])}

    def run(stopping: EarlyStopping, max_steps: int | None, resume: Any = None) -> pf.Trainer:
        trainer = pf.Trainer(
            max_epochs=5,
            max_steps=max_steps,
            callbacks=[stopping, Checkpoint(tmp_path, 1)],
            progress=False,
            val_every=val_every,
        )
        model = ByStep([])
        model.trainer = trainer
        trainer.fit(model, samples(8), VAL, batch_size=4, resume=resume)
        return trainer

    whole, parts = EarlyStopping(patience=2, restore_best=True), EarlyStopping(patience=2, restore_best=True)
    one = run(whole, None)
    assert whole.stopped_step == {"1ep": 8, 1: 5, 3: 9}[val_every]
    run(EarlyStopping(patience=2, restore_best=True), cut)
    other = run(parts, None, tmp_path)
    assert other.step == one.step
    assert (parts.best, parts.best_step, parts.wait) == (whole.best, whole.best_step, whole.wait)
    assert parts.stopped_step == whole.stopped_step
    for name, weight in one.engine.module.state_dict().items():
        assert torch.equal(weight, other.engine.module.state_dict()[name])


def test_a_run_that_had_stopped_stops_again_when_it_is_resumed(tmp_path: Path) -> None:
    fit([1.0, 2.0, 3.0], EarlyStopping(patience=2), callbacks=[Checkpoint(tmp_path)])
    stopping = EarlyStopping(patience=2)
    trainer = fit([9.0] * 9, stopping, resume=tmp_path)
    assert trainer.step == 6
    assert (stopping.stopped_step, stopping.best, stopping.wait) == (6, 1.0, 2)


def test_with_more_patience_it_goes_on(tmp_path: Path) -> None:
    fit([1.0, 2.0, 3.0], EarlyStopping(patience=2), callbacks=[Checkpoint(tmp_path)])
    stopping = EarlyStopping(patience=4)
    assert fit([4.0, 5.0, 6.0], stopping, resume=tmp_path).step == 10
    assert (stopping.stopped_step, stopping.best, stopping.wait) == (10, 1.0, 4)


def test_a_second_fit_begins_anew() -> None:
    stopping = EarlyStopping(patience=2)
    trainer = fit([1.0, 2.0, 3.0], stopping)
    trainer.fit(Scripted([9.0, 8.0, 9.0, 9.0]), samples(8), VAL, batch_size=4)
    assert (stopping.best, stopping.best_step, stopping.stopped_step) == (8.0, 4, 8)


def test_one_line_says_why() -> None:
    def said(values: list[float], **options: Any) -> str:
        trainer = pf.Trainer(max_epochs=4, callbacks=[EarlyStopping(patience=2, **options)])
        out = io.StringIO()
        trainer.console = Console(file=out, width=200)
        trainer.fit(Scripted(values), samples(8), VAL, batch_size=4)
        return next((line for line in out.getvalue().splitlines() if "step 2" in line or "stopped" in line), "")

    assert said([1.0, 2.0, 3.0]) == "stopped at step 6: val_loss was not better than 1 of step 2 in 2 measurements"
    assert said([4.0, 3.0, 2.0, 1.0]) == ""
    assert said([2.0, 1.0], target=1.0) == "stopped at step 4: val_loss has reached 1"
    assert said([1.0, 2.0, 3.0], restore_best=True).endswith("; the weights of step 2 are back")
    assert said([1.0, math.nan], stop_on_nan=True) == "stopped at step 4: val_loss is nan"


def _on_ranks(shards: int) -> tuple[int, int | None, float | None, list[float]]:
    callbacks: list[Any] = []
    whole: dict[int, torch.Tensor] = {}
    callbacks.append(
        LambdaCallback(
            on_checkpoint=lambda trainer, logs: whole.update(
                {trainer.step: trainer.engine.state_dict()["model"]["linear.weight"].clone()}
            )
        )
    )
    stopping = EarlyStopping(patience=2, restore_best=True)
    options = {"plugins": [ToyShard(shards)]} if shards > 1 else {}
    trainer = fit([4.0, 3.0, 5.0, 6.0, 1.0], stopping, callbacks=callbacks, **options)
    restored = trainer.engine.state_dict()["model"]["linear.weight"]
    assert torch.equal(restored, whole[4])
    assert not torch.equal(restored, whole[8])
    return trainer.step, stopping.stopped_step, stopping.best, restored.flatten().tolist()


@pytest.mark.parametrize("shards", [1, 2])
def test_ranks_agree_and_get_the_best_weights_back(ranks: Any, shards: int) -> None:
    first, second = ranks(2, _on_ranks, shards)
    assert first == second
    assert first[:3] == (8, 8, 3.0)


@pytest.mark.parametrize("first", ["stopping", "averages"])
@pytest.mark.parametrize("val_every", ["1ep", 3])
def test_with_averages_the_best_weights_are_those_that_were_measured(first: str, val_every: Any) -> None:
    torch.manual_seed(0)
    model = pf.configure(torch.nn.Linear(3, 1), optimizer="sgd", lr=0.4, loss="mse")
    x, noise = torch.randn(24, 3), torch.randn(24, 1)
    stopping = EarlyStopping("val_loss", patience=99, restore_best=True)
    callbacks: list[pf.Callback] = [stopping, pf.callbacks.EMA(0.8)]
    trainer = pf.Trainer(
        max_epochs=8,
        progress=False,
        val_every=val_every,
        callbacks=callbacks if first == "stopping" else callbacks[::-1],
    )
    trainer.fit(model, (x[:16], noise[:16]), (x[16:], noise[16:]), batch_size=4)
    assert stopping.best_step is not None
    best = min([stopping.best or 0.0, *trainer.history["val_loss"]])  # or of the run's end
    assert trainer.evaluate(model, (x[16:], noise[16:]), batch_size=8)["loss"] == pytest.approx(best)


def test_two_that_put_weights_in_the_model_at_the_end_are_refused() -> None:
    for other in (pf.callbacks.EMA(swap_at_end=True), pf.callbacks.StochasticWeightAveraging()):
        trainer = pf.Trainer(progress=False, callbacks=[EarlyStopping(restore_best=True), other])
        with pytest.raises(pf.errors.ParaflowError, match="would both put weights in the model when the run ends"):
            trainer.fit(linear(), samples(8), samples(8), batch_size=4)
