"""Rates are what was counted over the time that training took, on a clock that ticks where the test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import paraflow as pf
from paraflow.callbacks import Checkpoint, LambdaCallback, throughput
from paraflow.callbacks.throughput import Throughput
from tests.callbacks.runs import linear, samples

FLOPS = 2 * 2 * 2 * 1  # nn.Linear(2, 1): forward and the gradient of the weight, for one sample


class Clock(pf.Callback):
    """A step takes a second; a validation takes fifty, and a checkpoint a hundred."""

    now = 0.0

    def on_before_optimizer_step(self, trainer: pf.Trainer, logs: Any) -> None:
        Clock.now += 1.0

    def on_validation_end(self, trainer: pf.Trainer, logs: Any) -> None:
        Clock.now += 50.0

    def state_dict(self) -> dict[str, Any]:
        Clock.now += 100.0
        return {}


@contextmanager
def clock() -> Iterator[Clock]:
    former = throughput.time
    throughput.time = SimpleNamespace(perf_counter=lambda: Clock.now)  # type: ignore[attr-defined]
    try:
        yield Clock()
    finally:
        throughput.time = former


def fit(
    callback: Throughput,
    model: nn.Module | None = None,
    data: Any = None,
    before: Any = (),
    after: Any = (),
    **options: Any,
) -> list[dict[str, float]]:
    """Trains nine steps of four samples and one of two, unless options say otherwise; returns what the looks gave."""
    seen: list[dict[str, float]] = []
    note = LambdaCallback(on_step_end=lambda trainer, logs: seen.append({"step": trainer.step, **logs}))
    val, batch_size = options.pop("val", None), options.pop("batch_size", 4)
    with clock() as ticking:
        callbacks = [*before, ticking, callback, note, *after]
        trainer = pf.Trainer(callbacks=callbacks, progress=False, **{"max_epochs": 1, **options})
        trainer.fit(model or linear(), samples(38) if data is None else data, val, batch_size=batch_size)
    return [logs for logs in seen if "samples_per_second" in logs]


def test_samples_over_seconds() -> None:
    looks = fit(Throughput(every=3))
    # The first step warms up. Steps 2, 3: two of four samples; 4 to 6, 7 to 9: three of four.
    assert [logs["step"] for logs in looks] == [3, 6, 9]
    assert [logs["samples_per_second"] for logs in looks] == [4.0, 4.0, 4.0]
    assert [logs["seconds_per_step"] for logs in looks] == [1.0, 1.0, 1.0]
    assert "tokens_per_second" not in looks[0]
    assert "mfu" not in looks[0]


def test_a_short_batch_counts_what_it_has() -> None:
    looks = fit(Throughput(every=5))
    assert [logs["samples_per_second"] for logs in looks] == [4.0, (4 * 4 + 2) / 5]


def test_the_first_look_may_have_nothing_to_tell() -> None:
    assert [logs["step"] for logs in fit(Throughput(every=1))] == list(range(2, 11))


@pytest.mark.parametrize("before", [True, False])
def test_a_checkpoint_takes_no_time_of_training(tmp_path: Path, before: bool) -> None:
    saving = [Checkpoint(tmp_path, 4)]
    looks = fit(Throughput(every=3), **{"before" if before else "after": saving})
    assert [logs["step"] for logs in looks] == [3, 6, 9]
    assert [logs["samples_per_second"] for logs in looks] == [4.0] * 3


def test_validation_takes_no_time_of_training() -> None:
    looks = fit(Throughput(every=3), val=samples(4), val_every=2)
    assert [logs["samples_per_second"] for logs in looks] == [4.0] * 3


def test_waiting_for_data_takes_time_of_training() -> None:
    def batches() -> Iterator[Any]:
        x, y = samples(40)
        for start in range(0, 40, 4):
            Clock.now += 3.0
            yield x[start : start + 4], y[start : start + 4]

    looks = fit(Throughput(every=3), data=batches, batch_size=None)
    assert [logs["samples_per_second"] for logs in looks][1:] == [1.0, 1.0]


def test_operations_by_hand() -> None:
    net = pf.configure(
        nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1)), optimizer="sgd", lr=0.1, loss="mse"
    )
    one = 2 * (2 * 2 * 16 + 3 * 16)  # of the first layer no gradient of the input
    looks = fit(Throughput(every=5, peak_flops=4000.0), net, accumulate=2)
    for logs in looks:
        assert logs["flops_per_second"] == pytest.approx(one * logs["samples_per_second"])
        assert logs["flops_per_second_per_device"] == logs["flops_per_second"]
        assert logs["mfu"] == pytest.approx(one * logs["samples_per_second"] / 4000.0)


def test_operations_that_are_said_or_not_wanted() -> None:
    assert fit(Throughput(every=5, flops=100.0))[0]["flops_per_second"] == 400.0
    assert "flops_per_second" not in fit(Throughput(every=5, flops=None))[0]


def test_counting_changes_nothing() -> None:
    plain, counted = linear(), linear()
    pf.Trainer(max_epochs=2, progress=False).fit(plain, samples(8), batch_size=4)
    pf.Trainer(max_epochs=2, progress=False, callbacks=[Throughput()]).fit(counted, samples(8), batch_size=4)
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, counted.state_dict()[name])


class Failing(nn.Module):
    """Fails at its first try, in the middle of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.tries = 0
        pf.configure(self, optimizer="sgd", lr=0.1)

    def training_step(self, batch: Any) -> torch.Tensor:
        loss = functional.mse_loss(self.linear(batch[0]).squeeze(-1), batch[1])
        self.tries += 1
        if self.tries == 1:
            raise RuntimeError("no step")
        return loss


def test_counting_ends_with_an_error() -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    with pytest.raises(RuntimeError, match="no step"):
        pf.Trainer(callbacks=[Throughput()], progress=False).fit(Failing(), samples(8), batch_size=4)
    assert _get_current_dispatch_mode() is None


def test_a_step_that_is_tried_again_is_counted_once() -> None:
    class Again(pf.Callback):
        def on_train_begin(self, trainer: pf.Trainer, logs: Any) -> None:
            step = trainer.engine.train_step

            def twice(batch: Any) -> Any:
                try:
                    return step(batch)
                except RuntimeError:
                    return step(batch)

            trainer.engine.train_step = twice  # type: ignore[method-assign]

    looks = fit(Throughput(every=5), Failing(), before=[Again()])
    assert looks[0]["flops_per_second"] == 4.0 * FLOPS


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        pf.configure(self, optimizer="sgd", lr=0.1)

    def training_step(self, batch: Any) -> torch.Tensor:
        tokens = batch if isinstance(batch, torch.Tensor) else batch["input_ids"]
        return functional.mse_loss(self.embedding(tokens), torch.ones(*tokens.shape, 4))


TOKENS = torch.arange(40 * 6).reshape(40, 6) % 11
COUNTS: list[tuple[Any, Any, Callable[[], Any], float | None]] = [
    (TOKENS, "auto", Language, 4 * 6),
    ({"input_ids": TOKENS, "labels": TOKENS[:, :2]}, "auto", Language, 4 * 6),
    ({"input_ids": TOKENS, "labels": TOKENS[:, :2]}, "labels", Language, 4 * 2),
    ({"input_ids": TOKENS}, lambda batch: batch["input_ids"].numel() // 2, Language, 4 * 3),
    ({"input_ids": TOKENS}, lambda batch: (batch["input_ids"] >= 0).sum(), Language, 4 * 6),
    ({"input_ids": TOKENS}, None, Language, None),
    (samples(40), "auto", linear, None),
]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("data", "tokens", "model", "a_step"), COUNTS)
def test_tokens(data: Any, tokens: Any, model: Callable[[], Any], a_step: float | None, accumulate: int) -> None:
    looks = fit(Throughput(every=5, tokens=tokens), model(), data, accumulate=accumulate)
    assert [logs.get("tokens_per_second") for logs in looks] == [a_step, a_step]


def test_a_key_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        pf.ParaflowError, match=r"count the tokens of 'ids', and the batch has input_ids: name a tensor"
    ):
        fit(Throughput(tokens="ids"), Language(), {"input_ids": TOKENS})


@pytest.mark.parametrize("options", [{"flops": "none"}, {"flops": 0}, {"peak_flops": -1.0}, {"peak_flops": "much"}])
def test_arguments_of_another_kind_are_refused(options: Any) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(options))} must be operations, a number above zero, not"):
        Throughput(**options)


def test_a_second_fit_begins_anew() -> None:
    callback = Throughput(every=2)
    for _ in range(2):
        looks = fit(callback)
        assert [logs["step"] for logs in looks] == [2, 4, 6, 8, 10]
        assert {logs["flops_per_second"] / logs["samples_per_second"] for logs in looks} == {FLOPS}


def _on_ranks(data: str) -> list[dict[str, float]]:
    if data == "tokens":
        return fit(Throughput(every=5, peak_flops=1000.0), Language(), TOKENS)
    return fit(Throughput(every=5, peak_flops=1000.0))


def test_rates_are_of_all_ranks_together(ranks: Any) -> None:
    first, second = ranks(2, _on_ranks, "samples")
    for mine, other in zip(first, second, strict=True):
        mine.pop("loss"), other.pop("loss")
        assert mine == other
    assert [logs["samples_per_second"] for logs in first] == [4.0, (4 * 4 + 2) / 5]
    assert first[0]["flops_per_second"] == 4.0 * FLOPS
    assert first[0]["flops_per_second_per_device"] == 2.0 * FLOPS
    assert first[0]["mfu"] == pytest.approx(2.0 * FLOPS / 1000.0)
    assert [logs["tokens_per_second"] for logs in ranks(2, _on_ranks, "tokens")[1]] == [24.0, 24.0]
