"""The loop and its edges: trials, unknown lengths, empty data, batches that cannot be counted, pinned batches."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import paraflow as pf
from paraflow.checkpoint import find
from paraflow.checkpoint.reading import read
from paraflow.loggers import CSVLogger
from tests.callbacks.runs import linear, samples
from tests.callbacks.test_csv import rows_of
from tests.callbacks.traces import arrays, difference, network, state_of
from tests.pain.test_resume import Seeing


class Trying(pf.Callback):
    """Notes the state before and after a trial that breaks off."""

    def __init__(self, trial: pf.Callback) -> None:
        self.trial = trial
        self.difference = "was not there"

    def on_train_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        before = state_of(trainer)
        before = {**before, "model": {name: value.clone() for name, value in before["model"].items()}}
        forward = type(trainer.engine.module).forward
        calls = 0

        def fail(module: Any, x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == 5:
                raise RuntimeError("in the trial")
            return forward(module, x)

        trainer.engine.module.forward = fail.__get__(trainer.engine.module)
        with pytest.raises(RuntimeError, match="in the trial"):
            self.trial.on_train_begin(trainer, logs)
        del trainer.engine.module.forward
        assert calls == 5
        self.difference = difference(before, state_of(trainer))


@pytest.mark.parametrize("kind", ["LearningRateFinder", "BatchSizeFinder"])
def test_a_trial_that_breaks_off_leaves_no_trace(kind: str) -> None:
    trying = Trying(getattr(pf.callbacks, kind)())
    pf.Trainer(max_steps=1, progress=False, callbacks=[trying]).fit(network(), arrays(), batch_size=8)
    assert trying.difference == ""


def test_data_without_a_length_has_epochs_validation_and_checkpoints(tmp_path: Path) -> None:
    def batches() -> Iterator[Any]:
        x, y = samples(10)
        yield from ((x[start : start + 4], y[start : start + 4]) for start in (0, 4, 8))

    def run(epochs: int, *, stream: bool, **options: Any) -> pf.Trainer:
        callbacks = [pf.callbacks.Checkpoint(tmp_path / str(stream), "1ep", keep=9)]
        trainer = pf.Trainer(max_epochs=epochs, callbacks=callbacks, val_every="2ep")  # with a progress bar
        loader = DataLoader(TensorDataset(*samples(10)), batch_size=4)
        trainer.fit(linear(), *([batches, batches] if stream else [loader, loader]), **options)
        return trainer

    run(2, stream=True)
    trainer, known = run(4, stream=True, resume=tmp_path / "True"), run(4, stream=False)
    assert (trainer.steps_per_epoch, trainer.total_steps, trainer.step) == (None, None, 12)
    assert trainer.history.history.keys() == known.history.history.keys()
    for name, values in known.history.history.items():
        assert trainer.history[name] == pytest.approx(values, rel=1e-6, nan_ok=True)
    assert [path.name for path in sorted((tmp_path / "True").glob("step-*"))] == [
        f"step-{step:08d}" for step in (3, 6, 9, 12)
    ]


@pytest.mark.parametrize(
    "empty", [(torch.zeros(0, 2), torch.zeros(0)), DataLoader(TensorDataset(torch.zeros(0, 2), torch.zeros(0)))]
)
def test_empty_validation_data_is_refused_before_training(empty: Any) -> None:
    model, quiet = linear(), pf.Trainer(progress=False)
    weight = model.state_dict()["weight"].clone()
    with pytest.raises(pf.DataError, match="validation data"):
        quiet.fit(model, samples(8), empty)
    with pytest.raises(pf.DataError, match="data to evaluate"):
        quiet.evaluate(model, empty)
    with pytest.raises(pf.DataError, match="data to predict"):
        quiet.predict(model, empty)
    assert torch.equal(model.state_dict()["weight"], weight)


class Mean(pf.Model):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any) -> torch.Tensor:
        return batch["x"].mean() + self.weight

    validation_step = training_step


def ragged(first: str) -> list[dict[str, torch.Tensor]]:
    """Batches of four samples and of one, beside a table of two rows that is no sample's."""
    parts = [{"x": torch.tensor([0.0, 1.0, 2.0, 3.0])}, {"x": torch.tensor([9.0])}]
    tables = [{"table": torch.zeros(2, 5)}] * 2
    return [{**(a if first == "x" else b), **(b if first == "x" else a)} for a, b in zip(parts, tables, strict=True)]


def test_samples_are_counted_by_the_first_tensor_and_means_weigh_them() -> None:
    """The mean of 0, 1, 2, 3 and 9 is 3; that of the batches' means 1.5 and 9 would be 5.25."""
    plain = [{"x": batch["x"], "y": batch["x"], "table": batch["table"]} for batch in ragged("x")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # two of three tensors agree: nothing is guessed
        assert pf.Trainer(progress=False).evaluate(Mean(), plain)["loss"] == pytest.approx(3.0)
    with pytest.warns(UserWarning, match="different numbers of rows"):
        assert pf.Trainer(progress=False).evaluate(Mean(), ragged("x"))["loss"] == pytest.approx(3.0)


def test_batches_whose_first_tensor_may_not_be_the_samples_are_warned_of_once() -> None:
    with pytest.warns(UserWarning, match="different numbers of rows") as caught:
        pf.Trainer(max_epochs=2, progress=False).fit(Mean(), ragged("table"))
    said = [str(warning.message) for warning in caught if "different numbers of rows" in str(warning.message)]
    assert len(said) == 1
    assert "(2, 5), (4,)" in said[0]


def test_numbers_beside_the_loss_and_in_logs_keep_no_graph() -> None:
    """A step that hands out tensors with graphs, and a callback that keeps them, must not keep activations alive."""

    class Handing(pf.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any) -> Any:
            output = self.layer(batch[0])
            return {"loss": output.square().mean(), "largest": output.max(), "least": output.min()}

    def living() -> int:
        gc.collect()
        tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
        return sum(tensor.grad_fn is not None for tensor in tensors)

    kept: list[Any] = []
    counts: list[int] = []

    def keep(trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        kept.append(logs)
        counts.append(living())

    before = living()
    callback = pf.callbacks.LambdaCallback(on_step_end=keep)
    pf.Trainer(accumulate=2, progress=False, callbacks=[callback]).fit(Handing(), samples(12), batch_size=6)
    assert counts == [before] * 2
    assert float(kept[0]["largest"]) > float(kept[0]["least"])


def test_there_is_one_axis_of_steps(tmp_path: Path) -> None:
    """Three micro-batches a step: logs, validation, checkpoints, schedule and limit all count optimizer steps."""
    model = pf.configure(
        linear(),
        optimizer="sgd",
        lr=1.0,
        loss="mse",
        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    )
    trainer = pf.Trainer(
        max_steps=4,
        accumulate=3,
        val_every="2st",
        progress=False,
        callbacks=[pf.callbacks.Checkpoint(tmp_path / "saved", "2st", keep=9)],
        loggers=[CSVLogger(tmp_path / "log.csv", every=1)],
    )
    trainer.fit(model, samples(30), samples(6), batch_size=6)
    rows = rows_of(tmp_path / "log.csv")
    assert [row["step"] for row in rows if row["loss"]] == ["1", "2", "3", "4"]
    assert [float(row["lr"]) for row in rows if row["loss"]] == [1.0, 1.0, 0.5, 0.5]
    assert [row["step"] for row in rows if row["val_loss"]] == ["2", "4"]
    assert [path.name for path in sorted((tmp_path / "saved").iterdir())] == ["step-00000002", "step-00000004"]
    assert (trainer.step, trainer.engine.schedule.last_epoch, trainer.total_steps) == (4, 4, 4)


def overfitted(folder: str, workers: int, stop_at: int | None, resume: bool) -> tuple[list[int], list[float]]:
    """Ten noisy samples in shuffled batches of two, of which two batches are pinned."""

    class Noisy(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> torch.Tensor:
            return index + 0.5 * torch.rand(())

    noise: list[float] = []

    class Look(Seeing):
        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            noise.extend((batch % 1).tolist())
            return super().training_step(batch)

        def validation_step(self, batch: torch.Tensor) -> torch.Tensor:
            return batch.mean()

    model = Look()
    loader = DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=workers)
    trainer = pf.Trainer(
        max_epochs=3, max_steps=stop_at, overfit=2, progress=False, callbacks=[pf.callbacks.Checkpoint(folder, 1)]
    )
    history = trainer.fit(model, loader, torch.arange(10.0), resume=folder if resume else None, batch_size=None)
    if stop_at is None:
        assert trainer.step == 6
        assert history["val_loss"] == [pytest.approx(sum(range(10)) / 10)] * 3
    return model.seen, noise


@pytest.mark.parametrize("world_size", [1, 2])
def test_pinned_batches_are_the_same_in_every_epoch(ranks: Any, tmp_path: Path, world_size: int) -> None:
    results = ranks(world_size, overfitted, str(tmp_path / "whole"), 0, None, False)
    share = 4 // world_size
    for numbers, noise in results:
        assert len(numbers) == 3 * share
        assert numbers[:share] == numbers[share : 2 * share] == numbers[2 * share :]
        assert noise[:share] == noise[share : 2 * share] == noise[2 * share :]
    together = {number for numbers, _ in results for number in numbers}
    assert len(together) == 4
    ranks(world_size, overfitted, str(tmp_path / "parts"), 0, 3, False)
    rest = ranks(world_size, overfitted, str(tmp_path / "parts"), 0, None, True)
    for (numbers, noise), (all_numbers, all_noise) in zip(rest, results, strict=True):
        assert (numbers, noise) == (all_numbers[6 // world_size :], all_noise[6 // world_size :])


class Marks(pf.Callback):
    """Comes after Checkpoint in the list, and has counted each event when a checkpoint is made."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self._count("steps")

    def on_validation_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self._count("validations")

    def on_epoch_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self._count("epochs")

    def state_dict(self) -> dict[str, Any]:
        return dict(self.counts)


@pytest.mark.parametrize("first", [True, False])
def test_a_checkpoint_has_what_every_callback_did_with_its_step(tmp_path: Path, first: bool) -> None:
    saving, marks = pf.callbacks.Checkpoint(tmp_path, 1, keep=9), Marks()
    callbacks = [saving, marks] if first else [marks, saving]
    pf.Trainer(max_epochs=2, progress=False, callbacks=callbacks).fit(linear(), samples(8), samples(4), batch_size=4)
    saved = [read(tmp_path / f"step-{step:08d}")["callbacks"]["Marks-1"] for step in (1, 2, 3, 4)]
    assert saved == [
        {"steps": 1},
        {"steps": 2, "validations": 1, "epochs": 1},
        {"steps": 3, "validations": 1, "epochs": 1},
        {"steps": 4, "validations": 2, "epochs": 2},
    ]
    assert find(tmp_path).name == "step-00000004"
