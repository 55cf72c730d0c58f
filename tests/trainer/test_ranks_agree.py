"""Ranks that were given different things are refused with a sentence, and what they decide they decide together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import paraflow as pf

DATA = (torch.randn(24, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(24).long())


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return pf.configure(torch.nn.Linear(3, 2), optimizer="sgd", lr=0.1, loss="cross_entropy")


class Listening(pf.Callback):
    def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        logs["loss"]


def differing(what: str) -> str:
    with pytest.raises(pf.ParaflowError) as caught:
        _run_differing(what, pf.rank())
    return str(caught.value)


def _run_differing(what: str, rank: int) -> None:
    quiet = pf.Trainer(progress=False)
    runs: dict[str, Any] = {
        "callbacks": lambda: pf.Trainer(progress=False, callbacks=[Listening()] * (1 - rank)).fit(net(), DATA),
        "progress": lambda: pf.Trainer(progress=rank == 0).fit(net(), DATA),
        "rows": lambda: quiet.fit(net(), (torch.zeros(24 + rank, 3), torch.zeros(24 + rank).long())),
        "values": lambda: quiet.fit(net(), (torch.full((24, 3), float(rank)), DATA[1])),
        "stream lengths": lambda: quiet.fit(net(), [DATA] * (2 + rank)),
        "stream values": lambda: quiet.fit(net(), [(DATA[0] + rank, DATA[1])] * 2),
        "scalars": lambda: quiet.fit(Scalars(), DATA),
        "predictions": lambda: quiet.predict(Ragged(), [torch.zeros(4, 3)]),
        "plans": lambda: pf.Trainer(progress=False, **({"dp": 2} if rank else {"fsdp": 2})).fit(net(), DATA),
        "options": lambda: pf.Trainer(progress=False, plan=_plan_of(rank)).fit(net(), DATA),
        "plugins": lambda: pf.Trainer(progress=False, clip_norm=1.0 if rank else None).fit(net(), DATA),
        "plugin": lambda: pf.Trainer(progress=False, plugins=[Nothing()] * rank).fit(net(), DATA),
    }
    runs[what]()


def _plan_of(rank: int) -> pf.Plan:
    return pf.Plan(dp=2, options={"data_parallel": {"bucket_cap_mb": 25 + rank}})


class Nothing(pf.plugins.Plugin):
    name = "nothing"


class Scalars(pf.Model):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch: Any) -> Any:
        return {"loss": self.layer(batch[0]).mean(), f"of_rank_{pf.rank()}": 1.0}


class Ragged(pf.Model):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def predict_step(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(batch), 2 + pf.rank())


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("callbacks", "different callbacks"),
        ("progress", "different callbacks (or progress)"),
        ("rows", "different training data"),
        ("values", "different training data"),
        ("stream lengths", "read different batches"),
        ("stream values", "read different batches"),
        ("scalars", "returned different scalars"),
        ("predictions", "Rows of different shapes"),
        ("plans", "rank 0 has dp=1, fsdp=2, and rank 1 has dp=2, fsdp=1"),
        ("options", "rank 0 has options={'data_parallel': {'bucket_cap_mb': 25}}, and rank 1 has options="),
        ("plugins", "rank 0 has clip_norm=None, and rank 1 has clip_norm=1.0"),
        ("plugin", "different plugins: rank 0 has data_parallel, and rank 1 has data_parallel, nothing"),
    ],
)
def test_what_differs_is_refused_on_every_rank(ranks: Any, what: str, sentence: str) -> None:
    assert all(sentence in message for message in ranks(2, differing, what))


def stopped_by_one() -> tuple[int, int, int]:
    class Stop(pf.Callback):
        def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
            if trainer.step == 2 and trainer.mesh.rank == 0:
                trainer.stop()

    trainer = pf.Trainer(max_epochs=5, progress=False, callbacks=[Stop()])
    history = trainer.fit(net(), DATA, batch_size=4)
    return trainer.step, trainer.epoch, len(history)


def test_one_rank_stops_all(ranks: Any) -> None:
    assert ranks(2, stopped_by_one) == [(2, 0, 1)] * 2


@pytest.mark.parametrize("event", ["on_validation_end", "on_checkpoint", "on_epoch_end"])
def test_stopping_at_any_event_ends_the_epoch_in_order(event: str) -> None:
    ended: list[int] = []
    stop = pf.callbacks.LambdaCallback(
        **{event: lambda trainer, logs: trainer.stop() if trainer.step >= 2 else None},
        every="9ep",
    )
    noted = pf.callbacks.LambdaCallback(on_train_end=lambda trainer, logs: ended.append(trainer.step), every="9ep")
    trainer = pf.Trainer(max_epochs=4, progress=False, val_every=2, callbacks=[stop, noted])
    history = trainer.fit(net(), DATA, DATA, batch_size=8)
    assert len(history) == (1 if event == "on_validation_end" else len(history))
    assert ended == [trainer.step]
    assert trainer.step < 12
    assert len(history["loss"]) >= 1


class Augmented(torch.utils.data.Dataset[Any]):
    """Draws from all three generators, as augmentation does."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        import random

        drawn = [torch.rand(()).item(), float(np.random.rand()), random.random()]
        return torch.tensor([float(index), *drawn]), torch.tensor(0)


def seen(
    workers: int, folder: str | None = None, stop_at: int | None = None, resume: bool = False
) -> list[list[float]]:
    rows: list[list[float]] = []

    class Look(pf.Model):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch: Any) -> torch.Tensor:
            rows.extend(batch[0].tolist())
            return self.weight * batch[0].mean()

    loader = torch.utils.data.DataLoader(
        Augmented(), batch_size=4, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )
    callbacks = [pf.callbacks.Checkpoint(folder, every=1)] if folder else []
    trainer = pf.Trainer(max_epochs=2, max_steps=stop_at, progress=False, callbacks=callbacks)
    trainer.fit(Look(), loader, resume=folder if resume else None)
    return rows


@pytest.mark.parametrize("workers", [0, 1])
def test_augmentation_depends_on_seed_epoch_and_sample_only(ranks: Any, tmp_path: Path, workers: int) -> None:
    whole = sorted(seen(0))
    assert len({tuple(row[1:]) for row in whole}) == 24
    assert sorted(seen(workers)) == whole
    assert sorted(row for rows in ranks(2, seen, workers) for row in rows) == whole
    parts = seen(workers, str(tmp_path), stop_at=2) + seen(workers, str(tmp_path), resume=True)
    assert sorted(parts) == whole
