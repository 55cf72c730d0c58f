"""Ranks that are asked for different things: one reads, one is told to stop, one computes its activations again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import paraflow as pf
from tests.callbacks.runs import linear, samples


class Reads(pf.Callback):
    """Reads every number there is at every event, on rank 0 only, as something that writes them would."""

    def __init__(self) -> None:
        self.read: list[dict[str, float]] = []

    def _look(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        if pf.is_main():
            self.read.append({name: float(value) for name, value in dict(logs).items()})
            str(trainer.history)
            float(trainer.engine.last_norm or 0.0)

    on_step_end = on_validation_end = on_epoch_end = on_checkpoint = on_train_end = _look


def read_on_rank_0(reading: bool) -> tuple[list[float], list[dict[str, float]]]:
    model, callback = linear(), Reads()
    trainer = pf.Trainer(
        max_epochs=2, clip_norm=1.0, val_every=1, progress=False, callbacks=[callback] if reading else [], debug=reading
    )
    trainer.fit(model, samples(8), samples(3), batch_size=4)
    return model.state_dict()["weight"].flatten().tolist(), callback.read


def test_reading_every_number_on_one_rank_communicates_nothing(ranks: Any) -> None:
    """Debug mode compares every collective, so one that only rank 0 called would end the run."""
    first, second = ranks(2, read_on_rank_0, True)
    plain = ranks(2, read_on_rank_0, False)
    assert first[0] == second[0] == plain[0][0]
    assert second[1] == []
    assert {name for logs in first[1] for name in logs} == {"loss", "lr", "grad_norm", "val_loss"}


class Told(pf.Callback):
    """Rank 1 alone is told to stop, between the two micro-batches of the third step."""

    def __init__(self) -> None:
        self.micro_batches = 0

    def on_micro_batch_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.micro_batches += 1
        if self.micro_batches == 5 and pf.rank() == pf.world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.micro_batches >= 5:
            time.sleep(0.01)  # the run is not over before all ranks have heard


def train(folder: str, told: bool, resume: bool = False) -> tuple[int | str | None, int, int, list[float]]:
    """Six steps of two micro-batches in each of 60 epochs, unless told to stop."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    model, callback, code = linear(), Told(), None
    saving = pf.callbacks.Checkpoint(folder, "99ep")
    trainer = pf.Trainer(max_epochs=60, accumulate=2, progress=False, callbacks=[saving, *([callback] if told else [])])
    try:
        trainer.fit(model, samples(24), batch_size=4, resume=folder if resume else None)
    except SystemExit as ended:
        code = ended.code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return code, trainer.step, callback.micro_batches, model.state_dict()["weight"].flatten().tolist()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_signal_between_two_micro_batches_is_obeyed_after_the_step_on_every_rank(
    ranks: Any, tmp_path: Path, world_size: int
) -> None:
    whole = ranks(world_size, train, str(tmp_path / "whole"), False)
    stopped = ranks(world_size, train, str(tmp_path / "parts"), True)
    step = stopped[0][1]
    assert 3 <= step < 360
    for code, others, micro_batches, _ in stopped:
        assert (code, others) == (143, step)
        assert micro_batches == 2 * step  # the window was run to its end
    assert [path.name for path in (tmp_path / "parts").glob("step-*")] == [f"step-{step:08d}"]
    for mine, theirs in zip(ranks(world_size, train, str(tmp_path / "parts"), False, True), whole, strict=True):
        assert mine == (None, 360, 0, theirs[3])


class Recomputing(torch.nn.Module):
    """Computes its hidden layer again in backward."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.reentrant = torch.nn.Linear(2, 4), torch.nn.Linear(4, 1), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return self.last(self.first(x).tanh())
        x = x.requires_grad_(self.reentrant)  # without it reentrant checkpointing gives no gradient
        return self.last(checkpoint(lambda part: self.first(part).tanh(), x, use_reentrant=self.reentrant))


def recompute(reentrant: bool | None, find_unused: bool) -> list[float]:
    model = pf.configure(Recomputing(reentrant), optimizer="sgd", lr=0.1, loss="mse")
    plugin = pf.plugins.DataParallel(find_unused_parameters=find_unused)
    trainer = pf.Trainer(max_epochs=2, accumulate=2, progress=False, plugins=[plugin])
    trainer.fit(model, samples(10), batch_size=4)
    return model.first.weight.flatten().tolist()


@pytest.mark.parametrize(("reentrant", "find_unused"), [(False, False), (False, True), (True, False)])
def test_activations_computed_again_give_the_same_gradients_on_two_ranks(
    ranks: Any, reentrant: bool, find_unused: bool
) -> None:
    expected = recompute(None, False)
    for weight in ranks(2, recompute, reentrant, find_unused):
        assert weight == pytest.approx(expected, rel=1e-5)
