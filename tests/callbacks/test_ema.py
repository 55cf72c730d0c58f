"""The average of the weights is kept apart from them: in training, validation, checkpoints, and on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paraflow as pf
from paraflow.callbacks.ema import EMA
from paraflow.checkpoint import find, load_model
from tests.parity.tasks import CASES
from tests.plugins.toy_shard import ToyShard
from tests.trainer.test_resume import assert_equal, data, model


class OneWeight(pf.Model):
    """A weight that starts at 0 and whose gradient is always -1: with lr 1 it is the number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.seen: list[float] = []
        self.configure(optimizer="sgd", lr=1.0)

    def training_step(self, batch: Any) -> torch.Tensor:
        return -self.w

    def validation_step(self, batch: Any) -> torch.Tensor:
        self.seen.append(self.w.item())
        return self.w.detach()


ROWS = torch.zeros(8, 1)


def fit(callback: EMA, steps: int = 4, val: Any = None, net: nn.Module | None = None, **options: Any) -> pf.Trainer:
    """Two steps an epoch."""
    others = options.pop("others", [])
    trainer = pf.Trainer(max_steps=steps, progress=False, callbacks=[callback, *others], **options)
    trainer.fit(net or OneWeight(), ROWS, val, batch_size=4)
    return trainer


def average(callback: EMA) -> float:
    return float(callback.state_dict()["averages"]["w"])


BY_HAND: list[tuple[dict[str, Any], float]] = [
    ({"decay": 0.5}, 3.0625),  # 0.5, 1.25, 2.125
    ({"decay": 0.0}, 4.0),
    ({"decay": 0.5, "update_every": 2}, 2.5),  # 1 after step 2
    ({"decay": 0.5, "start_step": 2}, 3.25),  # 2, 2.5
    ({"decay": 0.5, "start_step": 9}, 4.0),  # not begun: the weights
    # Decays 1/10, 2/11, 3/12, 4/13 give 0.9, 1.8, 2.7, 3.6.
    ({"decay": 0.999, "warmup": True}, 3.6),
    # Decay 1/10 comes with step 3, and 2/11 with step 4: 2, 2.9, 3.8.
    ({"decay": 0.999, "warmup": True, "start_step": 2}, 3.8),
]


def averages_by_hand() -> list[float]:
    found = []
    for options, _ in BY_HAND:
        callback = EMA(**options)
        trainer = fit(callback)
        assert trainer.engine.module.w.item() == 4.0
        found.append(average(callback))
    return found


def test_the_average_is_that_by_hand(ranks: Any) -> None:
    expected = [value for _, value in BY_HAND]
    assert averages_by_hand() == pytest.approx(expected, rel=1e-6)
    for found in ranks(2, averages_by_hand):
        assert found == pytest.approx(expected, rel=1e-6)


def test_validation_is_of_the_average_and_training_of_the_weights() -> None:
    net = OneWeight()
    trainer = fit(EMA(decay=0.5), val=ROWS, net=net)
    assert trainer.history["val_loss"] == pytest.approx([1.25, 3.0625])
    assert net.w.item() == 4.0
    raw = fit(EMA(decay=0.5, validate=False), val=ROWS)
    assert raw.history["val_loss"] == [2.0, 4.0]
    late = fit(EMA(decay=0.5, start_step=3), val=ROWS)
    assert late.history["val_loss"] == [2.0, 3.5]


def test_outside_of_fit_what_is_in_the_model_counts() -> None:
    net, callback = OneWeight(), EMA(decay=0.5)
    trainer = fit(callback, net=net)
    assert trainer.evaluate(net, ROWS)["loss"] == 4.0
    with callback.averaged():
        assert trainer.evaluate(net, ROWS)["loss"] == pytest.approx(3.0625)
        assert net.w.item() == 3.0625
    assert net.w.item() == 4.0
    with pytest.raises(RuntimeError, match="within"), callback.averaged():
        raise RuntimeError("within")
    assert net.w.item() == 4.0


def test_an_evaluation_by_another_callback_within_averaged_leaves_the_averages_in() -> None:
    callback, net, seen = EMA(decay=0.5), OneWeight(), []

    def look(trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        with callback.averaged():
            trainer.evaluate(net, ROWS)
            seen.append(net.w.item())
        seen.append(net.w.item())

    fit(callback, steps=2, net=net, others=[pf.callbacks.LambdaCallback(on_epoch_end=look)])
    assert seen == [1.25, 2.0]


class Failing(OneWeight):
    def validation_step(self, batch: Any) -> torch.Tensor:
        assert self.w.item() == 1.25
        raise RuntimeError("in validation")


def test_an_exception_in_validation_leaves_the_raw_weights() -> None:
    net = Failing()
    with pytest.raises(RuntimeError, match="in validation"):
        fit(EMA(decay=0.5), val=ROWS, net=net)
    assert net.w.item() == 2.0


def test_training_goes_on_with_the_raw_weights_where_an_exception_was_caught() -> None:
    net = Failing()
    callback = EMA(decay=0.5)

    def look(trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        if trainer.step == 2:
            with pytest.raises(RuntimeError, match="in validation"):
                trainer.evaluate(net, ROWS)

    fit(callback, net=net, others=[pf.callbacks.LambdaCallback(on_epoch_end=look)])
    assert net.w.item() == 4.0
    assert average(callback) == 3.0625


def test_the_average_can_stay_in_the_model_and_checkpoints_have_the_raw_weights(tmp_path: Path) -> None:
    net = OneWeight()
    callback = EMA(decay=0.5, swap_at_end=True)
    trainer = fit(callback, net=net, others=[pf.callbacks.Checkpoint(tmp_path)])
    assert net.w.item() == 3.0625
    assert trainer.evaluate(net, ROWS)["loss"] == 3.0625
    loaded = OneWeight()
    load_model(loaded, tmp_path)
    assert loaded.w.item() == 4.0
    EMA.load(loaded, tmp_path)
    assert loaded.w.item() == 3.0625
    with pytest.raises(pf.ParaflowError, match=r"averaged weights are in the model.*save before"):
        trainer.save(tmp_path / "late")
    assert find(tmp_path).name == "step-00000004"


def test_a_checkpoint_while_the_averages_are_in_the_model_is_refused(tmp_path: Path) -> None:
    save: Callable[..., None] = lambda trainer, logs: trainer.save(tmp_path / "within")  # noqa: E731
    first = pf.callbacks.LambdaCallback(on_validation_end=save)
    net = OneWeight()
    with pytest.raises(pf.ParaflowError, match="averaged weights are in the model"):
        pf.Trainer(max_steps=2, progress=False, callbacks=[first, EMA(decay=0.5)]).fit(net, ROWS, ROWS, batch_size=4)
    assert not (tmp_path / "within").exists()
    assert net.w.item() == 2.0


def test_a_checkpoint_without_averages_says_so(tmp_path: Path) -> None:
    pf.Trainer(max_steps=2, progress=False, callbacks=[pf.callbacks.Checkpoint(tmp_path)]).fit(
        OneWeight(), ROWS, batch_size=4
    )
    with pytest.raises(pf.CheckpointError, match="has no averages: it was saved without EMA"):
        EMA.load(OneWeight(), tmp_path)


def test_a_second_fit_begins_anew() -> None:
    callback = EMA(decay=0.5)
    trainer = fit(callback)
    trainer.fit(OneWeight(), ROWS, batch_size=4)
    assert average(callback) == 3.0625


class Statistics(pf.Model):
    """A buffer that is the number of steps, and one of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(()), persistent=False)
        self.seen: list[tuple[float, int]] = []
        self.configure(optimizer="sgd", lr=1.0)

    def training_step(self, batch: Any) -> torch.Tensor:
        self.mean += 1
        self.count += 1
        self.scratch += 1
        return -self.w

    def validation_step(self, batch: Any) -> torch.Tensor:
        self.seen.append((self.mean.item(), self.count.item()))
        return self.w.detach()


@pytest.mark.parametrize(("buffers", "expected"), [("average", [1.25, 3.0625]), ("copy", [2.0, 4.0])])
def test_buffers_are_averaged_or_the_models_own(buffers: Any, expected: list[float]) -> None:
    net, callback = Statistics(), EMA(decay=0.5, buffers=buffers)
    fit(callback, val=torch.zeros(1, 1), net=net)
    assert net.seen == list(zip(expected, [2, 4], strict=True))
    assert (net.mean.item(), net.count.item()) == (4.0, 4)
    assert set(callback.state_dict()["averages"]) == ({"w", "mean"} if buffers == "average" else {"w"})


def run(folder: str, stop_at: int | None = None, resume: bool = False, **plan: Any) -> dict[str, Any]:
    """Four epochs of five steps of the model that has all that a resume can lose, averaged."""

    class Stop(pf.Callback):
        def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
            if trainer.step == stop_at:
                trainer.stop()

    callback = EMA(decay=0.9, warmup=True, update_every=2)
    callbacks = [callback, pf.callbacks.Checkpoint(folder), Stop()]
    trainer = pf.Trainer(max_epochs=4, progress=False, callbacks=callbacks, **plan)
    history = trainer.fit(model(), data(), data(), batch_size=8, resume=folder if resume else None)
    averages = callback.state_dict()
    return {"model": trainer.engine.state_dict()["model"], "averages": averages, "history": history.history}


@pytest.mark.parametrize(("world_size", "plan"), [(1, {"precision": "fp16"}), (2, {"accumulate": 2})])
def test_resume_is_bit_equal(ranks: Any, tmp_path: Path, world_size: int, plan: dict[str, Any]) -> None:
    whole = ranks(world_size, run, str(tmp_path / "whole"), **plan)
    ranks(world_size, run, str(tmp_path / "parts"), stop_at=3, **plan)
    resumed = ranks(world_size, run, str(tmp_path / "parts"), resume=True, **plan)
    assert whole[0]["averages"]["count"] > 5
    assert resumed[0]["averages"]["count"] == whole[0]["averages"]["count"]
    assert_equal(resumed[0]["averages"]["averages"], whole[0]["averages"]["averages"])
    for mine, theirs in zip(resumed, whole, strict=True):
        assert_equal(mine["model"], theirs["model"])
        for key, values in theirs["history"].items():
            assert mine["history"][key] == pytest.approx(values, rel=1e-12), key


def averaged(folder: str, degree: int, stop_at: int | None = None, resume: bool = False) -> dict[str, Any]:
    """Two epochs, under a plan that the package does not know; the averages of it all, and what one rank holds."""
    callback = EMA(decay=0.8)
    case = CASES["classification"]
    trainer = pf.Trainer(
        max_epochs=2,
        max_steps=stop_at,
        seed=5,
        progress=False,
        plugins=[ToyShard(degree)] if degree > 1 else [],
        callbacks=[callback, pf.callbacks.Checkpoint(folder)],
    )
    history = trainer.fit(case.model(), case.data(23), case.data(23), batch_size=10, resume=folder if resume else None)
    before = [parameter.detach().clone() for parameter in trainer.engine.parameters]
    result = {"averages": callback.state_dict()["averages"], "val_loss": history["val_loss"]}
    assert all(map(torch.equal, before, trainer.engine.parameters))
    result["model"] = {name: value.clone() for name, value in trainer.engine.state_dict()["model"].items()}
    result["elements"] = sum(tensor.numel() for tensor in callback._averages.tensors)
    return result


def test_shards_average_alike(ranks: Any, tmp_path: Path) -> None:
    alone = averaged(str(tmp_path / "alone"), 1)
    for mine in ranks(2, averaged, str(tmp_path / "sharded"), 2):
        assert mine["elements"] <= alone["elements"] / 2 + 4
        torch.testing.assert_close(mine["averages"], alone["averages"], rtol=1e-5, atol=1e-6)
        assert mine["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-5)
    assert not torch.equal(alone["averages"]["body.0.weight"], alone["model"]["body.0.weight"])
    loaded = CASES["classification"].model()
    EMA.load(loaded, tmp_path / "sharded")
    torch.testing.assert_close(dict(loaded.state_dict()), alone["averages"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("first", "second"), [(2, 2), (2, 1), (1, 2)])
def test_averages_saved_under_one_plan_go_on_under_another(ranks: Any, tmp_path: Path, first: int, second: int) -> None:
    whole = ranks(second, averaged, str(tmp_path / "whole"), second)
    ranks(first, averaged, str(tmp_path / "parts"), first, stop_at=4)
    tolerance = 0.0 if first == second else 1e-5
    for mine, theirs in zip(ranks(second, averaged, str(tmp_path / "parts"), second, resume=True), whole, strict=True):
        for key in ("averages", "model"):
            torch.testing.assert_close(mine[key], theirs[key], rtol=tolerance, atol=tolerance)


def test_state_can_be_loaded_while_a_run_goes_on() -> None:
    callback, net, kept = EMA(decay=0.5), OneWeight(), []

    def undo(trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        if trainer.step == 2:
            kept.append(callback.state_dict())
        if trainer.step == 3:
            callback.load_state_dict(kept[0])
            assert net.w.item() == 3.0

    fit(callback, net=net, others=[pf.callbacks.LambdaCallback(on_checkpoint=undo)])
    assert net.w.item() == 4.0
    assert average(callback) == 2.625  # 1.25 after step 2, then step 4
    assert float(kept[0]["averages"]["w"]) == 1.25


def test_tied_weights_are_averaged_once_and_loaded_at_both_places(tmp_path: Path) -> None:
    class Tied(OneWeight):
        def __init__(self) -> None:
            super().__init__()
            self.again = self.w

    fit(EMA(decay=0.5), net=Tied(), others=[pf.callbacks.Checkpoint(tmp_path)])
    loaded = Tied()
    EMA.load(loaded, tmp_path)
    assert loaded.w.item() == 3.0625


def test_half_precision_parameters_are_refused() -> None:
    with pytest.raises(pf.ParaflowError, match=r"w is torch.bfloat16.*Keep parameters in float32"):
        fit(EMA(), net=OneWeight().to(torch.bfloat16))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"decay": 1.0}, r"decay must be at least 0 and below 1, not 1\.0"),
        ({"update_every": 0}, "update_every must be a whole number of at least 1, not 0"),
        ({"start_step": -1}, "start_step must be a whole number of at least 0, not -1"),
        ({"buffers": "keep"}, "buffers must be 'average' or 'copy', not 'keep'"),
    ],
)
def test_arguments_of_another_kind_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        EMA(**options)
