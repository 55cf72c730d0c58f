"""The same training twice: by the Trainer under some plan, and by hand in one process on the whole batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import paraflow as pf
from paraflow.data.order import shuffled
from paraflow.parts import Elsewhere, whole
from tests.parity.tasks import CASES, FURTHER, Case

EPOCHS = 2


@dataclass
class Measured:
    """What a training gave: a number a step, the final parameters, and metrics by name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)


class Recorder(pf.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.losses.append(logs["loss"])
        self.norms.append(logs["grad_norm"])


def case_named(name: str) -> Case:
    return CASES[name] if name in CASES else FURTHER[name]


def by_trainer(name: str, count: int, batch_size: int, **plan: Any) -> Measured:
    """Trains a case under a plan, on this process or as one rank of many."""
    case, recorder = case_named(name), Recorder()
    model, data = case.model(), case.data(count)
    trainer = pf.Trainer(
        max_epochs=EPOCHS, seed=5, progress=False, callbacks=[recorder], **{"clip_norm": float("inf"), **plan}
    )
    history = trainer.fit(model, data, data, batch_size=batch_size)
    return Measured(recorder.losses, recorder.norms, whole_parameters(trainer), history.history)


def whole_parameters(trainer: pf.Trainer) -> dict[str, torch.Tensor]:
    """Returns the whole model's tensors by name; stages that hold the same must hold it bit by bit."""
    state = trainer.engine.state_dict()["model"]
    own = {k: whole(value).detach().clone() for k, value in state.items() if not isinstance(value, Elsewhere)}
    if trainer.engine.mesh.degree("pp") == 1:
        return own
    parts: list[Any] = [None] * trainer.engine.mesh.world_size
    torch.distributed.all_gather_object(parts, own)
    joined = {name: value for part in parts for name, value in part.items()}
    assert all(torch.equal(value, joined[name]) for part in parts for name, value in part.items())
    return {name: joined[name] for name in state}


def by_hand(name: str, count: int, batch_size: int, clip_norm: float = float("inf")) -> Measured:
    """Trains a case as one would by hand: each step one backward of the whole batch's mean."""
    case, result = CASES[name], Measured()
    model, data = case.model(), case.data(count)
    x, y = data.values() if isinstance(data, dict) else data
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(EPOCHS):
        order, epoch_sum, epoch_weight, correct = shuffled(count, 5, epoch), 0.0, 0.0, 0
        for start in range(0, count, batch_size):
            index = order[start : start + batch_size]
            optimizer.zero_grad()
            loss = case.loss(model, x[index], y[index])
            weight = float((y[index] != -100).sum())
            correct += int((model.body(x[index]).argmax(-1) == y[index]).sum())
            loss.backward()
            result.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)))
            optimizer.step()
            result.losses.append(loss.item())
            epoch_sum, epoch_weight = epoch_sum + loss.item() * weight, epoch_weight + weight
        with torch.no_grad():
            val_loss = float(case.loss(model, x, y))
            val_accuracy = float((model.body(x).argmax(-1) == y).float().mean())
        for key, value in (
            ("loss", epoch_sum / epoch_weight),
            ("val_loss", val_loss),
            ("accuracy", correct / count),
            ("val_accuracy", val_accuracy),
        ):
            result.metrics.setdefault(key, []).append(value)
    result.parameters = {key: value.detach().clone() for key, value in model.state_dict().items()}
    return result


def assert_same(mine: Measured, theirs: Measured, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Compares losses, norms, parameters and the metrics that both have."""
    torch.testing.assert_close(mine.losses, theirs.losses, rtol=rtol, atol=atol, msg=lambda m: f"losses: {m}")
    torch.testing.assert_close(mine.norms, theirs.norms, rtol=rtol, atol=atol, msg=lambda m: f"norms: {m}")
    assert mine.parameters.keys() == theirs.parameters.keys()
    for name, parameter in theirs.parameters.items():
        torch.testing.assert_close(
            mine.parameters[name], parameter, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}"
        )
    shared = mine.metrics.keys() & theirs.metrics.keys()
    assert "loss" in shared
    assert "val_loss" in shared
    for name in shared:
        torch.testing.assert_close(
            mine.metrics[name], theirs.metrics[name], rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}"
        )
