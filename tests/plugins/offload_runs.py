"""Trainings under plans that change where and when the optimizer is applied, and the same without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import paraflow as pf
from tests.parity.tasks import CASES, samples

COUNT, BATCH = 23, 10


def state_after(name: str = "classification", **plan: Any) -> dict[str, Any]:
    """What the engine has after two epochs under a plan."""
    case = CASES[name]
    trainer = pf.Trainer(max_epochs=2, seed=5, progress=False, **plan)
    trainer.fit(case.model(), case.data(COUNT), batch_size=BATCH)
    return trainer.engine.state_dict()


def assert_equal(one: Any, other: Any) -> None:
    """Compares nested states, to the bit."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_equal(value, other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_equal(mine, theirs)
    elif isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    else:
        assert one == other


def resumed(folder: Path, first: dict[str, Any], second: dict[str, Any], half: bool = False) -> dict[str, Any]:
    """Stops after four steps under one plan, goes on under another, and returns the state at the end."""
    for plan, steps, resume in ((first, 4, None), (second, None, folder)):
        model = CASES["classification"].model()
        data = samples(COUNT)
        if half:
            model, data = model.to(torch.bfloat16), (data[0].to(torch.bfloat16), data[1])
        trainer = pf.Trainer(
            max_epochs=2,
            max_steps=steps,
            seed=5,
            progress=False,
            callbacks=[pf.callbacks.Checkpoint(folder)],
            **plan,
        )
        trainer.fit(model, data, batch_size=BATCH, resume=resume)
    return trainer.engine.state_dict()


class Scheduled(pf.Model):
    """Two parameter groups, a schedule, a frozen layer and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = torch.nn.Linear(6, 8)
        self.again = torch.nn.Linear(8, 8)
        self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)
        self.last = torch.nn.Linear(8, 4)
        self.configure(optimizer="adamw", lr=1e-2, weight_decay=0.1, schedule="cosine", warmup=2, loss="cross_entropy")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.again(torch.tanh(self.again(torch.tanh(self.first(x)))))
        return self.last(torch.tanh(self.frozen(hidden)))


def scheduled(callbacks: list[pf.Callback] | None = None, **plan: Any) -> dict[str, Any]:
    """What the engine has after two epochs of the model with everything."""
    data = samples(COUNT)
    trainer = pf.Trainer(max_epochs=2, seed=5, progress=False, callbacks=callbacks or [], **plan)
    trainer.fit(Scheduled(), data, data, batch_size=BATCH)
    return trainer.engine.state_dict()
