"""One training of the matrix, on this process or as one rank of many."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

import paraflow as pf
from tests.matrix.models import CASES
from tests.matrix.observed import Observed, observed
from tests.matrix.pieces import joined, pieces_of

BATCH, STEPS = 8, 3


@dataclass(frozen=True)
class Job:
    """What is trained, and how.

    Attributes:
        fields: The plan's fields.
        run: The kind of run (`tests.matrix.models.CASES`).
        folder: Where the checkpoint is saved.
        source: The checkpoint that the run goes on from, where it does.
        steps: Steps in all.
    """

    fields: Mapping[str, Any]
    run: str
    folder: str | None = None
    source: str | None = None
    steps: int = STEPS


@dataclass
class Outcome:
    """What a training gave: a number a step, and the rest at its end.

    Attributes:
        losses, norms: Of each step, with what the whole batch has.
        metrics: Of each epoch, and of evaluation by name.
        spared: In the last step, how often ``blocks`` have run, and the ``copies`` of activations to the host; of a
            whole outcome on all ranks together.
        begun: What `state` was before the first step, after a checkpoint was taken up.
        drawn: What each call of a dropout layer in training has kept, by the layer's name; of a whole outcome a list of
            that, one for each rank.
        state: Parameters with buffers, the optimizer's state by parameter name, averages and predictions: of each
            tensor what this rank holds (`tests.matrix.pieces`), until they are `whole`.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    spared: dict[str, int] = field(default_factory=dict)
    begun: dict[str, Any] = field(default_factory=dict)
    drawn: Any = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


def whole(outcomes: Sequence[Outcome]) -> Outcome:
    """Puts together what all ranks have; what each has of the whole must agree, to the bit."""
    first = outcomes[0]
    for other in outcomes[1:]:
        assert (other.losses, other.norms, other.metrics) == (first.losses, first.norms, first.metrics)
    state, begun = (joined([getattr(outcome, name) for outcome in outcomes]) for name in ("state", "begun"))
    spared = {name: sum(outcome.spared[name] for outcome in outcomes) for name in first.spared}
    drawn = [outcome.drawn for outcome in outcomes]
    return Outcome(first.losses, first.norms, first.metrics, spared, begun, drawn, state)


class Recorder(pf.Callback):
    def __init__(self, outcome: Outcome, observed: Observed) -> None:
        self.outcome, self.observed = outcome, observed

    def on_train_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        if trainer.step:
            self.outcome.begun = state_of(trainer)

    def on_step_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.observed.begin()

    def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.outcome.losses.append(logs["loss"])
        self.outcome.spared = self.observed.seen()
        if "grad_norm" in logs:
            self.outcome.norms.append(logs["grad_norm"])


def train(job: Job) -> Outcome:
    """Trains for a few steps, saves, and says what came of it."""
    case, outcome = CASES[job.run], Outcome()
    model, data = case.model(), case.data(case.count)
    outcome.drawn = noted_draws(model)
    with observed() as seen:
        trainer = trainer_of(job, [*case.callbacks(), Recorder(outcome, seen)])
        history = trainer.fit(model, data, data, batch_size=BATCH, resume=job.source)
    outcome.metrics = dict(history.history)
    outcome.state = state_of(trainer)
    if case.reads:
        outcome.metrics["evaluated"] = trainer.evaluate(model, data, batch_size=5)
        outcome.state["predictions"] = pieces_of(trainer.predict(model, data, batch_size=5))
    if job.folder is not None:
        trainer.save(job.folder)
    return outcome


def noted_draws(model: nn.Module) -> dict[str, list[torch.Tensor]]:
    """Returns what will hold, for each dropout layer, which elements each forward of a training has kept."""
    drawn: dict[str, list[torch.Tensor]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Dropout) and layer.p > 0:
            layer.register_forward_hook(partial(_note, drawn.setdefault(name, [])))
    return drawn


def _note(kept: list[torch.Tensor], layer: nn.Module, args: Any, output: torch.Tensor) -> None:
    again = torch._C._current_graph_task_id() != -1  # in a backward
    if layer.training and type(output) is torch.Tensor and not again:
        kept.append(output.detach() != 0)


def trainer_of(job: Job, callbacks: Sequence[pf.Callback] = ()) -> pf.Trainer:
    """The Trainer that somebody would write for the fields; options of plugins are said in a plan."""
    flags = {name: value for name, value in job.fields.items() if name != "options"}
    plan = pf.Plan(options=job.fields["options"]) if "options" in job.fields else None
    return pf.Trainer(**flags, plan=plan, max_steps=job.steps, seed=5, progress=False, callbacks=list(callbacks))


def state_of(trainer: pf.Trainer) -> dict[str, Any]:
    """What this rank holds of parameters, the optimizer's state and averages of weights."""
    state = trainer.engine.state_dict()
    averages = [
        callback.state_dict()["averages"] for callback in trainer.callbacks if isinstance(callback, pf.callbacks.EMA)
    ]
    parts = {"parameters": state["model"], "optimizer": state["optimizer"]["state"]}
    return pieces_of({**parts, "averages": averages[0]} if averages else parts)


def train_all(jobs: Sequence[Job]) -> list[Outcome | str]:
    """Trains one after another; one that raises has its traceback instead, and the others go on."""
    return [_attempt(job) for job in jobs]


def _attempt(job: Job) -> Outcome | str:
    try:
        return train(job)
    except Exception:
        return traceback.format_exc()
