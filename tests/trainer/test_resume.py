"""A resumed run is, bit for bit, the run that never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import paraflow as pf


class Noisy(pf.Model):
    """Dropout, batch statistics and a frozen layer: all that a resume can lose."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(5, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(16, 3),
        )
        self.frozen = torch.nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.body(x))


def model() -> Noisy:
    pf.seed(3)
    return Noisy().configure(
        optimizer="adamw", lr=1e-2, schedule="cosine", warmup=3, loss="cross_entropy", metrics=["accuracy"]
    )


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(40, 5, generator=generator), torch.randint(0, 3, (40,), generator=generator)


def run(folder: str, stop_at: int | None = None, resume: bool = False, **plan: Any) -> dict[str, Any]:
    """Trains four epochs of five steps, or stops after a step, or goes on from what was saved."""

    class Stop(pf.Callback):
        def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
            if trainer.step == stop_at:
                trainer.stop()

    net = model()
    trainer = pf.Trainer(
        max_epochs=4, progress=False, callbacks=[pf.callbacks.Checkpoint(folder, every=1), Stop()], **plan
    )
    history = trainer.fit(net, data(), data(), batch_size=8, resume=folder if resume else None)
    state = trainer.engine.state_dict()
    return {"model": state["model"], "optimizer": state["optimizer"]["state"], "history": history.history}


def assert_equal(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


PLANS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (1, {"precision": "fp16", "accumulate": 2, "clip_norm": 1.0}),
    (2, {"accumulate": 2, "optimizer_implementation": "fused"}),
    # From three ranks on, which bucket a gradient is in decides in which order it is summed.
    (3, {"plugins": [pf.plugins.DataParallel(bucket_cap_mb=1e-4)]}),
]


@pytest.mark.parametrize(("world_size", "plan"), PLANS)
def test_resume_is_bit_equal(ranks: Any, tmp_path: Path, world_size: int, plan: dict[str, Any]) -> None:
    whole = ranks(world_size, run, str(tmp_path / "whole"), **plan)
    # Twice: within the first epoch, and at the end of the second.
    ranks(world_size, run, str(tmp_path / "parts"), stop_at=3, **plan)
    ranks(world_size, run, str(tmp_path / "parts"), stop_at=10, resume=True, **plan)
    resumed = ranks(world_size, run, str(tmp_path / "parts"), resume=True, **plan)
    for mine, theirs in zip(resumed, whole, strict=True):
        assert_equal(mine["model"], theirs["model"])
        assert_equal(mine["optimizer"], theirs["optimizer"])
        assert mine["history"].keys() == theirs["history"].keys()
        for key, values in theirs["history"].items():
            assert mine["history"][key] == pytest.approx(values, rel=1e-12), key


def test_a_run_goes_on_with_other_ranks(ranks: Any, tmp_path: Path) -> None:
    """The order of samples and the global batch do not depend on the ranks, so neither do the weights."""
    plan: dict[str, Any] = {}
    whole = plain(str(tmp_path / "whole"), **plan)
    ranks(2, plain, str(tmp_path / "parts"), stop_at=7)
    resumed = plain(str(tmp_path / "parts"), resume=True)
    for name, parameter in whole.items():
        torch.testing.assert_close(resumed[name], parameter, rtol=1e-5, atol=1e-6)


def plain(folder: str, stop_at: int | None = None, resume: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    net = pf.configure(torch.nn.Linear(5, 3), optimizer="adamw", lr=1e-2, loss="cross_entropy")
    checkpoint = pf.callbacks.Checkpoint(folder, every=1)
    trainer = pf.Trainer(
        max_epochs=4 if stop_at is None else None, max_steps=stop_at, progress=False, callbacks=[checkpoint]
    )
    trainer.fit(net, data(), batch_size=8, resume=folder if resume else None)
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def test_a_finished_run_has_nothing_to_do(tmp_path: Path) -> None:
    first = run(str(tmp_path))
    again = run(str(tmp_path), resume=True)
    assert_equal(again["model"], first["model"])
    assert again["history"] == first["history"]


def test_skipped_samples_are_not_loaded(tmp_path: Path) -> None:
    class Recording(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            self.read: list[int] = []

        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            self.read.append(index)
            return torch.full((5,), float(index)), torch.tensor(index % 3)

    def train(dataset: Recording, max_steps: int, resume: bool) -> None:
        torch.manual_seed(0)
        net = pf.configure(torch.nn.Linear(5, 3), optimizer="sgd", lr=1e-3, loss="cross_entropy")
        checkpoint = pf.callbacks.Checkpoint(tmp_path, every=1)
        trainer = pf.Trainer(max_steps=max_steps, progress=False, callbacks=[checkpoint])
        trainer.fit(net, dataset, batch_size=4, resume=tmp_path if resume else None)

    whole, first, rest = Recording(), Recording(), Recording()
    pf.Trainer(max_steps=5, progress=False).fit(
        pf.configure(torch.nn.Linear(5, 3), lr=1e-3, loss="cross_entropy"), whole, batch_size=4
    )
    train(first, 3, resume=False)
    train(rest, 5, resume=True)
    assert first.read == whole.read[:12]
    assert rest.read == whole.read[12:]
    assert sorted(first.read + rest.read) == list(range(20))


def test_another_model_is_refused_by_name_and_shape(tmp_path: Path) -> None:
    run(str(tmp_path), stop_at=1)
    other = pf.configure(torch.nn.Linear(5, 3), loss="cross_entropy")
    with pytest.raises(
        pf.CheckpointError, match=r"another model: it lacks bias \(3,\), weight \(3, 5\); it has body\.0\.bias \(16,\)"
    ):
        pf.Trainer(progress=False).fit(other, data(), resume=tmp_path)
    with pytest.raises(pf.CheckpointError, match="does not exist"):
        pf.Trainer(progress=False).fit(model(), data(), resume=tmp_path / "nowhere")


def test_another_seed_is_refused(tmp_path: Path) -> None:
    run(str(tmp_path), stop_at=1)
    with pytest.raises(pf.DataError, match=r"Trainer\(seed=0\)"):
        run(str(tmp_path), resume=True, seed=4)


def test_weights_alone_can_be_loaded(tmp_path: Path) -> None:
    trained = run(str(tmp_path))
    fresh = model()
    pf.checkpoint.load_model(fresh, tmp_path)
    assert_equal(dict(fresh.state_dict()), trained["model"])


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(7, 4)
            self.head = torch.nn.Linear(4, 7, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(x))

    net = pf.configure(Tied(), loss="cross_entropy", optimizer="adamw")
    x = torch.arange(7)
    trainer = pf.Trainer(max_steps=2, progress=False, callbacks=[pf.callbacks.Checkpoint(tmp_path)])
    trainer.fit(net, (x, x))
    other = Tied()
    pf.checkpoint.load_model(other, tmp_path)
    assert other.head.weight is other.table.weight
    assert_equal(other.table.weight, net.table.weight)
    assert len(trainer.engine.parameters) == 1
