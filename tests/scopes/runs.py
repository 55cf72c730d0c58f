"""The same training of a model in scopes, by whatever ranks there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import paraflow as pf
from paraflow.parts import whole
from tests.parity.runs import Recorder


@dataclass
class Trained:
    """What a training gave; of parameters those that this rank has, each whole."""

    losses: list[float]
    norms: list[float]
    history: dict[str, list[float]]
    parameters: dict[str, torch.Tensor]
    evaluated: dict[str, float]
    predicted: torch.Tensor
    plan: str
    spread: list[str]


def train(
    model: Callable[[], nn.Module], data: Any, *, batch_size: int = 8, deferred: bool = False, **fields: Any
) -> Trained:
    """Trains a model for an epoch, evaluates it, and predicts with it."""
    torch.manual_seed(3)
    if deferred:
        with pf.deferred_init():
            made = model()
    else:
        made = model()
    recorder = Recorder()
    trainer = pf.Trainer(
        max_epochs=1, seed=5, progress=False, callbacks=[recorder], **{"clip_norm": float("inf"), **fields}
    )
    history = trainer.fit(made, data, data, batch_size=batch_size)
    evaluated = trainer.evaluate(made, data, batch_size=batch_size)
    predicted = trainer.predict(made, data, batch_size=batch_size)
    own = {n: v for n, v in trainer.engine.state_dict()["model"].items() if isinstance(v, torch.Tensor)}
    state = {name: whole(value).detach().clone() for name, value in own.items()}
    spread = [name for name, parameter in made.named_parameters() if hasattr(parameter, "to_local")]
    return Trained(
        recorder.losses, recorder.norms, history.history, state, evaluated, predicted, str(trainer.plan), spread
    )


def assert_same(ranks: list[Trained], one: Trained, tolerance: float = 1e-5) -> None:
    """Every rank's training is that of one process."""
    assert {name for rank in ranks for name in rank.parameters} == set(one.parameters)
    for rank in ranks:
        for mine, other in ((rank.losses, one.losses), (rank.norms, one.norms)):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(other), rtol=tolerance, atol=tolerance)
        assert rank.history.keys() == one.history.keys()
        for mine, other in ((rank.history, one.history), (rank.evaluated, one.evaluated)):
            for name, values in other.items():
                torch.testing.assert_close(
                    torch.tensor(mine[name]), torch.tensor(values), rtol=tolerance, atol=tolerance, msg=name
                )
        for name, value in rank.parameters.items():
            torch.testing.assert_close(value, one.parameters[name], rtol=tolerance, atol=tolerance, msg=name)
        torch.testing.assert_close(rank.predicted, one.predicted, rtol=tolerance, atol=tolerance)
