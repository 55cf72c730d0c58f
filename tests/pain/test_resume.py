"""What a resumed run sees, does and remembers: samples by number, steps by count."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

import paraflow as pf
from tests.callbacks.runs import linear, samples


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


class Rotating(Sampler[int]):
    """Epoch e begins with sample e."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        return iter([(self.epoch + place) % 6 for place in range(6)])


class Seeing(pf.Model):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[int] = []

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen += batch.int().tolist()
        return self.weight * batch.mean()


def seen(kind: str, folder: str, stop_at: int | None, resume: bool) -> list[int]:
    """Three steps of two samples an epoch, for three epochs, or until a step."""
    sampler = Rotating()
    options = {"batch_sampler": BatchSampler(sampler, 2, False)} if kind == "batch sampler" else {"sampler": sampler}
    if kind == "sampler":
        options["batch_size"] = 2
    model = Seeing()
    trainer = pf.Trainer(
        max_epochs=3, max_steps=stop_at, progress=False, callbacks=[pf.callbacks.Checkpoint(folder, 1)]
    )
    trainer.fit(model, DataLoader(Numbers(), **options), resume=folder if resume else None)
    return model.seen


@pytest.mark.parametrize("kind", ["sampler", "batch sampler"])
def test_a_run_that_stopped_in_its_second_epoch_goes_on_in_that_epochs_order(
    ranks: Any, tmp_path: Path, kind: str
) -> None:
    parts = [(4, False, [0, 1, 2, 3, 4, 5, 1, 2]), (5, True, [3, 4]), (None, True, [5, 0, 2, 3, 4, 5, 0, 1])]
    for world_size in (1, 2):
        folder = str(tmp_path / str(world_size))
        for stop_at, resume, expected in parts:
            results = ranks(world_size, seen, kind, folder, stop_at, resume)
            together = [number for step in zip(*results, strict=True) for number in step]
            assert together == expected


def test_batches_drawn_at_random_and_dropout_go_on_to_the_bit(tmp_path: Path) -> None:
    """Reading past what was seen draws nothing of what training draws."""

    def batches() -> Iterator[Any]:
        for _ in range(4):
            x = torch.randn(4, 3)
            yield x, (x.sum(1) > 0).long()

    def run(folder: Path, stop_at: int | None = None, **options: Any) -> torch.Tensor:
        pf.seed(1)
        body = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
        model = pf.configure(body, optimizer="sgd", lr=0.1, loss="cross_entropy")
        saving = pf.callbacks.Checkpoint(folder, 1)
        trainer = pf.Trainer(max_epochs=2, max_steps=stop_at, progress=False, callbacks=[saving])
        trainer.fit(model, batches, **options)
        return model[0].weight.detach().clone()

    whole = run(tmp_path / "whole")
    stopped = run(tmp_path / "parts", stop_at=3)
    resumed = run(tmp_path / "parts", resume=tmp_path / "parts")
    assert torch.equal(resumed, whole)
    assert not torch.equal(resumed, stopped)


class Counter(pf.Callback):
    """Counts the steps it has seen, in strides of its own."""

    every = 1

    def __init__(self, stride: int) -> None:
        self.stride, self.count = stride, 0

    def on_after_optimizer_step(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.count += self.stride

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_two_callbacks_of_one_class_get_their_own_state_back(tmp_path: Path) -> None:
    def run(epochs: int, **options: Any) -> list[int]:
        counters = [Counter(1), Counter(10)]
        callbacks = [*counters, pf.callbacks.Checkpoint(tmp_path)]
        pf.Trainer(max_epochs=epochs, progress=False, callbacks=callbacks).fit(
            linear(), samples(8), batch_size=4, **options
        )
        return [counter.count for counter in counters]

    assert run(2) == [4, 40]
    assert run(3, resume=tmp_path) == [6, 60]


def test_a_run_that_goes_on_trains_the_rest_and_remembers_the_beginning(tmp_path: Path) -> None:
    def run(epochs: int) -> tuple[int, int, int]:
        counter = Counter(1)
        trainer = pf.Trainer(max_epochs=epochs, progress=False, callbacks=[counter, pf.callbacks.Checkpoint(tmp_path)])
        counter.load_state_dict = lambda state: None  # type: ignore[method-assign]
        history = trainer.fit(linear(), samples(8), batch_size=4, resume="auto")
        return counter.count, trainer.step, len(history)

    assert run(2) == (4, 4, 2)
    assert run(5) == (6, 10, 5)
    assert run(5) == (0, 10, 5)


def stopped_and_begun_anew() -> list[tuple[int, int]]:
    class Once(pf.Callback):
        stopped = False

        def on_checkpoint(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
            if not self.stopped and pf.is_main():
                trainer.stop()
            self.stopped = True

    trainer = pf.Trainer(max_epochs=3, progress=False, callbacks=[Once()])
    done = []
    for _ in range(2):
        trainer.fit(linear(), samples(8), batch_size=4)
        done.append((trainer.step, trainer.epoch))
        trainer.stop()  # asked for while nothing runs: it stops nothing later
    return done


def test_a_run_that_was_stopped_stops_no_later_one(ranks: Any) -> None:
    for world_size in (1, 2):
        for done in ranks(world_size, stopped_and_begun_anew):
            assert done[0][0] < 6
            assert done[1] == (6, 3)


EVENTS = [
    "on_step_begin",
    "on_after_backward",
    "on_micro_batch_end",
    "on_before_optimizer_step",
    "on_after_optimizer_step",
    "on_step_end",
    "on_validation_begin",
    "on_validation_end",
    "on_epoch_end",
    "on_checkpoint",
]


def run(*callbacks: pf.Callback, **options: Any) -> tuple[torch.Tensor, list[float]]:
    """Two steps an epoch, of two micro-batches each."""
    model = linear()
    trainer = pf.Trainer(max_epochs=3, accumulate=2, progress=False, callbacks=callbacks)
    history = trainer.fit(model, samples(8), samples(4), batch_size=4, **options)
    return model.state_dict()["weight"].clone(), [*history["loss"], *history["val_loss"]]


@pytest.mark.parametrize("event", EVENTS)
def test_a_save_at_any_event_is_refused_or_loses_nothing(tmp_path: Path, event: str) -> None:
    """Within a step the batch is behind and its gradients are half there: nothing may be gone on from that."""
    refusals: list[str] = []

    def save(trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        if trainer.step in (1, 2):
            try:
                trainer.save(tmp_path / f"step-{trainer.step:08d}")
            except pf.ParaflowError as error:
                refusals.append(str(error))

    weight, losses = run(pf.callbacks.LambdaCallback(**{event: save}))
    saved = sorted(tmp_path.iterdir())
    assert saved or refusals
    assert all("between two steps" in text for text in refusals)
    for folder in saved:
        resumed, others = run(resume=folder)
        assert torch.equal(resumed, weight)
        assert others == pytest.approx(losses, rel=1e-12)
