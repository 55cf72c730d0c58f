"""What a run leaves, bit by bit: to see that a callback which tried something out has left nothing else."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn

import paraflow as pf


class Network(nn.Module):
    """Has all that a trial could leave a trace in: statistics, dropout and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(8, 3)
        self.body[0].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def network(**recipe: Any) -> nn.Module:
    options = {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "schedule": "cosine", "warmup": 2, **recipe}
    return pf.configure(Network(), loss="cross_entropy", **options)


def arrays(count: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 4, generator=generator)
    return x, x[:, :3].argmax(1)


class Augmented(torch.utils.data.Dataset[Any]):
    """Samples with noise of torch, numpy and Python on them."""

    def __init__(self, count: int = 32) -> None:
        self.x, self.y = arrays(count)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(()) + np.random.rand() + random.random()
        return self.x[index] + 0.1 * noise.float(), self.y[index]


class Witness(pf.Callback):
    """Notes the whole state when training begins, after the callbacks before it, and the loss of each step."""

    def __init__(self) -> None:
        self.began: dict[str, Any] = {}
        self.losses: list[tuple[float, float]] = []

    def on_train_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.began = _copied(state_of(trainer))

    def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.losses.append((logs["loss"], logs["lr"]))


def state_of(trainer: pf.Trainer) -> dict[str, Any]:
    state = {key: value for key, value in trainer.state_dict().items() if key != "callbacks"}
    generators = [torch.get_rng_state(), *random.getstate()[1], *np.random.get_state()[1:3]]
    modes = [module.training for module in trainer.engine.module.modules()]
    gradients = [parameter.grad for parameter in trainer.engine.parameters] if not trainer.step else []
    return {**state, "generators": generators, "modes": modes, "gradients": gradients, "rate": trainer.engine.lr}


def left_by(
    callbacks: list[pf.Callback], data: str = "arrays", model: nn.Module | None = None, **plan: Any
) -> list[Any]:
    """Trains a network with callbacks, and returns all that there is to compare afterwards, and at the beginning."""
    witness = Witness()
    model = network() if model is None else model
    train: Any = {"arrays": arrays, "dataset": Augmented}[data]()
    trainer = pf.Trainer(max_epochs=2, seed=3, progress=False, callbacks=[*callbacks, witness], **plan)
    history = trainer.fit(model, train, arrays(9), batch_size=8)
    return [witness.began, witness.losses, history.history, _copied(state_of(trainer))]


def _copied(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return [_copied(value) for value in state] if isinstance(state, (list, tuple)) else state


def difference(one: Any, other: Any, path: str = "") -> str:
    """Returns where two states differ in a bit, or an empty text."""
    if isinstance(one, (torch.Tensor, np.ndarray)):
        one, other = torch.as_tensor(one), torch.as_tensor(other)
        return "" if one.dtype == other.dtype and torch.equal(one, other) else path
    if isinstance(one, dict):
        if list(one) != list(other):
            return f"{path}: {list(one)} and {list(other)}"
        return next(filter(None, (difference(one[key], other[key], f"{path}/{key}") for key in one)), "")
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return f"{path}: {len(one)} and {len(other)}"
        parts = (difference(a, b, f"{path}/{n}") for n, (a, b) in enumerate(zip(one, other, strict=True)))
        return next(filter(None, parts), "")
    return "" if one == other else f"{path}: {one} and {other}"
