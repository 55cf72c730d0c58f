"""The equal-weight average of the last weights, and batch normalisation's statistics for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

import paraflow as pf
from paraflow.callbacks.weight_averaging import StochasticWeightAveraging as SWA
from paraflow.checkpoint import load_model
from paraflow.data.order import shuffled
from tests.callbacks.test_ema import ROWS, OneWeight
from tests.parity.tasks import CASES
from tests.plugins.toy_shard import ToyShard
from tests.trainer.test_resume import assert_equal, data, model


def fit(callback: SWA, steps: int = 8, net: nn.Module | None = None, **options: Any) -> pf.Trainer:
    """Two steps an epoch."""
    others, rows = options.pop("others", []), options.pop("rows", ROWS)
    trainer = pf.Trainer(max_steps=steps, progress=False, callbacks=[callback, *others], **options)
    trainer.fit(net or OneWeight(), rows, options.pop("val", None), batch_size=4)
    return trainer


BY_HAND: list[tuple[dict[str, Any], float]] = [
    ({"start": 0.5}, 6.0),  # after steps 4, 6 and 8
    ({"start": 3}, 6.0),
    ({"start": 5}, 7.0),  # 6 and 8
    ({"start": 0.5, "every": 1}, 6.0),  # 4 to 8
    ({"start": 6, "every": "1st"}, 7.0),
    ({"start": 1, "every": 3}, 4.5),  # 3 and 6
    ({"start": 0, "every": "2ep"}, 6.0),  # 4 and 8
]


def weights_at_the_end() -> list[float]:
    nets = [OneWeight() for _ in BY_HAND]
    for net, (options, _) in zip(nets, BY_HAND, strict=True):
        fit(SWA(**options), net=net)
    return [net.w.item() for net in nets]


def test_the_average_is_that_by_hand(ranks: Any) -> None:
    expected = [value for _, value in BY_HAND]
    assert weights_at_the_end() == pytest.approx(expected, rel=1e-6)
    for found in ranks(2, weights_at_the_end):
        assert found == pytest.approx(expected, rel=1e-6)


def test_checkpoints_and_validation_are_of_the_raw_weights(tmp_path: Path) -> None:
    net, callback = OneWeight(), SWA(0.5)
    trainer = pf.Trainer(max_steps=8, progress=False, callbacks=[callback, pf.callbacks.Checkpoint(tmp_path)])
    history = trainer.fit(net, ROWS, ROWS, batch_size=4)
    assert history["val_loss"] == [2.0, 4.0, 6.0, 8.0]
    assert net.w.item() == 6.0
    loaded = OneWeight()
    load_model(loaded, tmp_path)
    assert loaded.w.item() == 8.0
    SWA.load(loaded, tmp_path)
    assert loaded.w.item() == 6.0
    with pytest.raises(pf.ParaflowError, match="averaged weights are in the model"):
        trainer.save(tmp_path / "late")


class Rates(pf.Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.rates.append(float(logs["lr"]))


@pytest.mark.parametrize(
    ("anneal", "expected"),
    [(0, [1.0, 1.0, 1.0, 0.2, 0.2, 0.2, 0.2, 0.2]), (4, [1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])],
)
@pytest.mark.filterwarnings("ignore:The run ended before")
def test_the_learning_rate_is_set_or_goes_there(anneal: int, expected: list[float]) -> None:
    rates, net = Rates(), OneWeight()
    fit(SWA(3, every=99, lr=0.2, anneal=anneal), net=net, others=[rates])
    assert rates.rates == pytest.approx(expected)
    assert net.w.item() == pytest.approx(sum(expected))


def test_no_learning_rate_leaves_the_schedules() -> None:
    with_it, without = Rates(), Rates()
    for rates, callbacks in ((with_it, [SWA(0.5, batch_norm=False)]), (without, [])):
        net = OneWeight().configure(optimizer="sgd", lr=1.0, schedule="cosine")
        pf.Trainer(max_steps=8, progress=False, callbacks=[*callbacks, rates]).fit(net, ROWS, batch_size=4)
    assert with_it.rates == without.rates
    assert len(set(without.rates)) == 8


def normalised() -> pf.Model:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.0), nn.Linear(4, 1))
    return pf.configure(net, optimizer="sgd", lr=0.2, loss="mse")


def rows(count: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(4)) + 2
    return x, x.sum(1, keepdim=True)


def test_weights_and_statistics_are_those_of_torch() -> None:
    """Three steps an epoch, four epochs, the average of the last two."""
    net, (x, y) = normalised(), rows()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    averaged = AveragedModel(net)
    for epoch in range(4):
        for index in shuffled(24, 7, epoch).split(8):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x[index]), y[index]).backward()
            optimizer.step()
        if epoch >= 2:
            averaged.update_parameters(net)
    update_bn((x[index] for index in shuffled(24, 7, 3).split(8)), averaged)

    mine = normalised()
    trainer = pf.Trainer(max_epochs=4, seed=7, progress=False, callbacks=[SWA(9)])
    trainer.fit(mine, (x, y), batch_size=8)
    assert mine.training
    assert mine[1].momentum == 0.1
    for name, value in averaged.module.state_dict().items():
        if name != "1.num_batches_tracked":  # torch counts the batches of the last pass, here training goes on counting
            torch.testing.assert_close(mine.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name)
    assert mine[1].num_batches_tracked == 12


def statistics_of(batch_size: int, count: int, **plan: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    net = normalised()
    trainer = pf.Trainer(max_epochs=2, seed=7, progress=False, callbacks=[SWA(1)], **plan)
    trainer.fit(net, rows(count), batch_size=batch_size)
    return net[1].running_mean, net[1].running_var, net[0](rows(count)[0]).detach()


@pytest.mark.parametrize("count", [24, 22])
def test_the_mean_is_that_of_all_samples_on_all_ranks(ranks: Any, count: int) -> None:
    results = ranks(2, statistics_of, 8, count)
    results.append(statistics_of(8, count, accumulate=2))
    for mean, var, inputs in results:
        torch.testing.assert_close(mean, inputs.mean(0), rtol=1e-5, atol=1e-6)
        assert (var / inputs.var(0)).sub(1).abs().max() < 0.6  # within micro-batches of a few samples
    torch.testing.assert_close(results[0][:2], results[1][:2], rtol=0, atol=0)


def test_measuring_leaves_position_and_random_state_alone() -> None:
    seen: list[Any] = []

    class Around(pf.Callback):
        def on_train_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
            seen.append((trainer.run.feed.state_dict(), torch.get_rng_state(), trainer.engine.module.training))

    net = normalised()
    net[2].p = 0.5
    before = net[1].running_mean.clone()
    pf.Trainer(max_steps=4, progress=False, callbacks=[Around(), SWA(1, every=1), Around()]).fit(
        net, rows(), batch_size=8
    )
    assert_equal(seen[0], seen[1])
    assert seen[0][0]["position"] == 8
    assert not torch.equal(net[1].running_mean, before)


def test_data_that_can_be_read_once_keeps_the_statistics_and_says_so() -> None:
    net = normalised()
    x, y = rows()
    batches = ((x[i : i + 8], y[i : i + 8]) for i in (0, 8, 16))
    with pytest.warns(UserWarning, match=r"keeps the raw weights' statistics, for .* could not be read again"):
        pf.Trainer(max_steps=3, progress=False, callbacks=[SWA(1, every=1)]).fit(net, batches)
    assert torch.isfinite(net[1].running_mean).all()
    assert net[1].running_mean.abs().sum() > 0
    assert net[1].momentum == 0.1


def test_layers_that_were_set_to_evaluation_keep_their_statistics() -> None:
    net = pf.configure(normalised(), optimizer="sgd", lr=0.01, loss="mse")
    net[1].eval()
    fit(SWA(1, every=1), steps=4, net=net, rows=rows(8))
    assert torch.equal(net[1].running_mean, torch.zeros(4))


def run(folder: str, stop_at: int | None = None, resume: bool = False) -> Any:
    class Stop(pf.Callback):
        def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
            if trainer.step == stop_at:
                trainer.stop()

    callback = SWA(0.5, every=2, lr=5e-3, anneal=4)
    net = model()
    callbacks = [callback, pf.callbacks.Checkpoint(folder), Stop()]
    pf.Trainer(max_epochs=4, progress=False, callbacks=callbacks).fit(
        net, data(), data(), batch_size=8, resume=folder if resume else None
    )
    return {"model": dict(net.state_dict()), "raw": [tensor.clone() for tensor in callback._averages.tensors]}


def test_resume_is_bit_equal(ranks: Any, tmp_path: Path) -> None:
    whole = ranks(2, run, str(tmp_path / "whole"))
    ranks(2, run, str(tmp_path / "parts"), stop_at=13)
    for mine, theirs in zip(ranks(2, run, str(tmp_path / "parts"), resume=True), whole, strict=True):
        assert_equal(mine["raw"], theirs["raw"])
        assert_equal(mine["model"], theirs["model"])


def averaged(degree: int) -> dict[str, torch.Tensor]:
    case = CASES["classification"]
    plugins = [ToyShard(degree)] if degree > 1 else []
    trainer = pf.Trainer(max_epochs=3, seed=5, progress=False, plugins=plugins, callbacks=[SWA(1, every=1)])
    trainer.fit(case.model(), case.data(23), batch_size=10)
    return {name: value.clone() for name, value in trainer.engine.state_dict()["model"].items()}


def test_shards_average_alike(ranks: Any) -> None:
    alone = averaged(1)
    for mine in ranks(2, averaged, 2):
        torch.testing.assert_close(mine, alone, rtol=1e-5, atol=1e-6)


def test_it_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = pf.Trainer(max_epochs=4, callbacks=[SWA(0.5)])
    trainer.fit(normalised(), rows(), batch_size=8)
    out = capsys.readouterr().out
    assert "averaged the weights of 3 moments from step 6 on" in out
    assert "measured batch normalisation anew (1 layers, 24 samples)" in out


def test_a_run_without_any_average_keeps_its_weights_and_warns() -> None:
    net = OneWeight()
    with pytest.warns(UserWarning, match="ended before StochasticWeightAveraging averaged any"):
        fit(SWA(99), net=net)
    assert net.w.item() == 8.0


def test_a_fraction_needs_a_length() -> None:
    batches = lambda: iter([torch.zeros(4, 1)] * 3)  # noqa: E731
    with pytest.raises(pf.ParaflowError, match=r"start=0\.75\) is a fraction.*Give a step"):
        pf.Trainer(max_epochs=1, progress=False, callbacks=[SWA()]).fit(OneWeight(), batches)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"start": 1.5}, r"start must be a step, or a fraction .* not 1\.5"),
        ({"start": -1}, "start must be a step, or a fraction .* not -1"),
        ({"lr": 0}, "lr must be above 0, not 0"),
        ({"every": "now"}, "'now' is no interval"),
    ],
)
def test_arguments_of_another_kind_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        SWA(**options)
