"""What one process computes, for each kind of run, once."""

from __future__ import annotations

import math
import tempfile
from functools import cache

import torch
from torch.nn import functional

from paraflow.data.division import Division
from paraflow.data.order import shuffled
from tests.matrix.models import CASES
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


@cache
def of_ranks(run: str, ranks: int) -> Outcome:
    """A run in which ranks draw random numbers of their own, by hand in one process: one share after another.

    Each rank's generator is put in place for its share, and the shares' gradients are added up.
    """
    case, outcome = CASES[run], Outcome()
    model, (x, y) = case.model(), case.data(case.count)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    generators = []
    for rank in range(ranks):
        torch.manual_seed(5 + rank)
        generators.append(torch.get_rng_state())
    order = shuffled(case.count, 5, 0)
    for start in range(0, case.count, BATCH):
        batch, total = order[start : start + BATCH], 0.0
        optimizer.zero_grad()
        for rank in range(ranks):
            ((first, last),) = Division(ranks, rank).micro_batches(len(batch))
            mine = batch[first:last]
            torch.set_rng_state(generators[rank])
            loss = functional.cross_entropy(model(x[mine]), y[mine], reduction="sum") / len(batch)
            generators[rank] = torch.get_rng_state()
            loss.backward()
            total += loss.item()
        outcome.losses.append(total)
        outcome.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)))
        optimizer.step()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    steps = {names[id(parameter)]: values for parameter, values in optimizer.state.items()}
    outcome.state = joined([pieces_of({"parameters": model.state_dict(), "optimizer": steps})])
    return outcome
