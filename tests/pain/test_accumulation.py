"""A window of micro-batches belongs to the training loop: nothing that is read or evaluated inside ends it early."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import paraflow as pf
from tests.callbacks.runs import linear, samples
from tests.trainer.test_memory import BATCH, Hungry, data

NUMBERS = torch.arange(1.0, 11.0)  # batches of 4, 4 and 2, with means 2.5, 6.5 and 9.5


class Slope(pf.Model):
    """The gradient of its one weight is the mean of the data, so with rate 1 the weight is minus the means' sum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.other = DataLoader(torch.zeros(3), batch_size=1)
        self.read = 0
        self.configure(optimizer="sgd", lr=1.0)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.read += len(list(self.other))
        return (self.weight * batch).mean()

    def validation_step(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.mean()


def with_readings_inside() -> tuple[float, int, int, list[float]]:
    seen: list[float] = []

    class Evaluate(pf.Callback):
        def on_micro_batch_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
            seen.append(trainer.evaluate(trainer.engine.module, NUMBERS[:3], batch_size=2)["loss"])

    model = Slope()
    trainer = pf.Trainer(accumulate=2, progress=False, callbacks=[Evaluate()])
    trainer.fit(model, DataLoader(NUMBERS, batch_size=4))
    return model.weight.item(), trainer.step, model.read, seen


def test_a_loader_that_ends_inside_a_window_ends_no_window(ranks: Any) -> None:
    for world_size, micro_batches in ((1, 2 + 2 + 2), (2, 2 + 2 + 1)):
        for weight, steps, read, seen in ranks(world_size, with_readings_inside):
            assert weight == pytest.approx(-18.5)
            assert steps == 3
            assert read == 3 * micro_batches
            assert seen == [2.0] * micro_batches


def test_windows_that_memory_has_made_smaller_are_part_of_what_is_saved(tmp_path: Path) -> None:
    """Ten samples fit in parts of three: the run that goes on neither tries ten again nor weighs parts otherwise."""

    def run(fits: int, folder: Path, stop_at: int | None = None, **options: Any) -> Hungry:
        model = Hungry(fits, 0, "forward", counted=False).configure(optimizer="adamw", lr=1e-2)
        trainer = pf.Trainer(
            max_epochs=2,
            max_steps=stop_at,
            seed=5,
            progress=False,
            auto="O1",
            optimizer_implementation="default",
            callbacks=[pf.callbacks.Checkpoint(folder, 1)],
        )
        trainer.fit(model, data(), batch_size=BATCH, **options)
        return model

    whole = run(99, tmp_path / "whole")
    run(3, tmp_path / "parts", stop_at=2)
    resumed = run(3, tmp_path / "parts", resume=tmp_path / "parts")
    assert max(resumed.sizes) == 3
    for name, weight in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("first", "second"), [(2, 3), (3, 1), (1, 4)])
def test_a_run_goes_on_with_windows_of_another_length(tmp_path: Path, first: int, second: int) -> None:
    """Where a run is, is counted in samples and steps, so the second part sees just the rest."""

    def run(accumulate: int, folder: Path, stop_at: int | None = None, **options: Any) -> tuple[int, torch.Tensor]:
        model = linear()
        saving = pf.callbacks.Checkpoint(folder, 1)
        trainer = pf.Trainer(max_epochs=2, max_steps=stop_at, accumulate=accumulate, progress=False, callbacks=[saving])
        trainer.fit(model, samples(11), batch_size=4, **options)
        return trainer.step, model.state_dict()["weight"].clone()

    whole = run(1, tmp_path / "whole")
    run(first, tmp_path / "parts", stop_at=2)
    step, weight = run(second, tmp_path / "parts", resume=tmp_path / "parts")
    assert (step, whole[0]) == (6, 6)
    torch.testing.assert_close(weight, whole[1], rtol=1e-5, atol=1e-6)
