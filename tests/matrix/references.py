"""What one process computes, for each kind of run, once."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import combinations
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import paraflow as pf
from paraflow.data.order import shuffled
from tests.matrix.models import CASES, TOKENS
from tests.matrix.pieces import joined, pieces_of
from tests.matrix.training import BATCH, STEPS, Job, Outcome, train, whole

SAVED_AT = 2


@cache
def reference(run: str, clip_norm: float = math.inf, steps: int = STEPS) -> Outcome:
    """The run on one device in fp32, without any strategy; never resumed."""
    return whole([train(Job({"clip_norm": clip_norm}, run, steps=steps))])


@cache
def saved_on_one_device(run: str, clip_norm: float = math.inf) -> str:
    """The folder of a checkpoint from the middle of an epoch."""
    folder = tempfile.mkdtemp(prefix="paraflow-matrix-")
    train(Job({"clip_norm": clip_norm}, run, folder=f"{folder}/{run}", steps=SAVED_AT))
    return f"{folder}/{run}"


Kept = Mapping[str, Sequence[torch.Tensor]]


def of_draws(run: str, kept: Kept) -> Outcome:
    """A run by hand in which dropout keeps, in each step, what it is told of the whole batch, by the layer's name."""
    case, outcome = CASES[run], Outcome()
    model, (x, y) = case.model(), case.data(case.count)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    order = shuffled(case.count, 5, 0)
    for name, masks in kept.items():
        model.get_submodule(name).register_forward_hook(partial(_keep, iter(masks)))
    for start in range(0, case.count, BATCH):
        batch = order[start : start + BATCH]
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        outcome.losses.append(loss.item())
        outcome.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)))
        optimizer.step()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = {names[id(parameter)]: values for parameter, values in optimizer.state.items()}
    outcome.state = joined([pieces_of({"parameters": model.state_dict(), "optimizer": state})])
    return outcome


def _keep(masks: Iterator[torch.Tensor], layer: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> Any:
    assert isinstance(layer, nn.Dropout)
    return args[0] * next(masks) / (1 - layer.p)


def draws_of_ranks(plan: pf.Plan, drawn: Sequence[Kept]) -> Kept:
    """Puts together what the ranks of a plan have drawn, for the whole batch of each step; data ranks draw apart."""
    data, tp, steps, count = plan.data_ranks, plan.tp, STEPS, plan.accumulate
    whole: dict[str, list[torch.Tensor]] = {}
    for name in drawn[0]:
        made = [mask for rank in drawn for mask in rank[name]]  # of one stage's ranks, in order of rank
        assert len(made) == data * tp * steps * count, f"{name} ran {len(made)} times on all ranks"
        grid = [made[at : at + steps * count] for at in range(0, len(made), steps * count)]
        groups = [_of_group(grid[at : at + tp]) for at in range(0, data * tp, tp)]
        assert all(not torch.equal(mine[0], theirs[0]) for mine, theirs in combinations(groups, 2))
        whole[name] = [
            torch.cat([mask for group in groups for mask in group[step * count : (step + 1) * count]])
            for step in range(steps)
        ]
    return whole


def _of_group(ranks: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """What ranks that share layers have kept: the same, or each of its share of the sequence."""
    calls = list(zip(*ranks, strict=True))
    if all(mask.shape[1] == TOKENS for call in calls for mask in call):
        assert all(torch.equal(mask, call[0]) for call in calls for mask in call)
        return [call[0] for call in calls]
    assert all(not torch.equal(mine, theirs) for mine, theirs in combinations(calls[0], 2))
    return [torch.cat(call, dim=1) for call in calls]
