"""The same few steps by plain torch on one process, and under a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import paraflow as pf
from paraflow.data.order import shuffled
from tests.parity.runs import Recorder, whole_parameters

SEED = 5


@dataclass
class Steps:
    """What some steps gave: loss and gradient norm of each, and the parameters at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """What is trained, with SGD of rate 1: a step moves parameters by their clipped gradients.

    Attributes:
        model: Makes the model, whose `mean_loss(x, y)` is the mean that one step descends.
        data: Inputs and targets.
        batch_size: Samples of a step.
        epochs: Times that the data are gone through.
        clip: Bound on the gradient norm.
    """

    model: Callable[[], Any]
    data: tuple[torch.Tensor, torch.Tensor]
    batch_size: int
    epochs: int = 1
    clip: float = 0.5

    def by_hand(self) -> Steps:
        """Trains with plain torch."""
        model, found = self.model(), Steps()
        x, y = self.data
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        for epoch in range(self.epochs):
            order = shuffled(len(x), SEED, epoch)
            for start in range(0, len(x), self.batch_size):
                index = order[start : start + self.batch_size]
                optimizer.zero_grad()
                loss = model.mean_loss(x[index], y[index])
                loss.backward()
                found.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), self.clip)))
                optimizer.step()
                found.losses.append(float(loss.detach()))
        found.parameters = {name: value.detach() for name, value in model.state_dict().items()}
        return found

    def under(self, model: nn.Module | None = None, **plan: Any) -> Steps:
        """Trains under a plan; `scale` in it is the first loss scale of fp16."""
        scale, options = plan.pop("scale", None), plan.pop("options", {})
        recorder = Recorder()
        trainer = pf.Trainer(
            max_epochs=self.epochs,
            seed=SEED,
            progress=False,
            callbacks=[recorder],
            plugins=[pf.plugins.Precision("fp16", initial_scale=scale)] if scale else [],
            plan=pf.Plan(clip_norm=self.clip, options=options, **plan),
        )
        trainer.fit(self.model() if model is None else model, self.data, batch_size=self.batch_size)
        return Steps(recorder.losses, recorder.norms, whole_parameters(trainer))


def assert_alike(
    everywhere: list[list[Steps]], plans: list[dict[str, Any]], expected: Steps, loose: float = 1e-2
) -> None:
    """Every rank's steps are those of one process, and every rank has logged the same, bit by bit.

    Args:
        everywhere: Of each rank the steps under each plan.
        plans: The plans.
        expected: The steps on one process.
        loose: The bound where a plan computes in 16 bits; it is 1e-5 elsewhere.
    """
    for at, plan in enumerate(plans):
        bound = loose if plan.get("scale") else 1e-5
        for found in (results[at] for results in everywhere):
            assert (found.losses, found.norms) == (everywhere[0][at].losses, everywhere[0][at].norms), plan
            close(found.losses, expected.losses, bound, f"losses under {plan}")
            close(found.norms, expected.norms, bound, f"norms under {plan}")
            assert found.parameters.keys() == expected.parameters.keys(), plan
            for name, value in expected.parameters.items():
                close(found.parameters[name], value, bound, f"{name} under {plan}")


def close(found: Any, expected: Any, bound: float, what: str) -> None:
    """Compares with a bound that is relative, or a tenth of it from zero."""
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound / 10, msg=lambda m: f"{what}: {m}")
