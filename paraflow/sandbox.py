"""Running a part of a training for a look at it, and undoing what it did."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paraflow.buffers import Buffers
from paraflow.checkpoint.random import random_state, restore_random_state
from paraflow.engine import Engine
from paraflow.step import StepHooks

if TYPE_CHECKING:
    from paraflow.trainer import Trainer


@contextmanager
def preserved(trainer: Trainer) -> Iterator[None]:
    """Runs a block that may train ``trainer.engine`` on ``trainer.run.feed``; afterwards all is as it was before.

    Model, optimizer, schedule, plugins, position in the data, meters and every random generator are put back, also
    when the block raises. Inside, no callback hears of the steps. Every rank enters and leaves: a collective.
    """
    engine, run = trainer.engine, trainer.run
    state = copy.deepcopy({"engine": engine.state_dict(), "run": run.state_dict()})
    hooks, engine.hooks = engine.hooks, StepHooks()
    with surroundings(engine):
        try:
            yield
        finally:
            engine.hooks = hooks
            engine.load_state_dict(state["engine"])
            run.load_state_dict(state["run"])


@contextmanager
def surroundings(engine: Engine) -> Iterator[None]:
    """Puts back what no state holds: random generators, modes, gradients, buffers that are not persistent."""
    generators = random_state(engine.mesh)
    modes = [(module, module.training) for module in engine.module.modules()]
    buffers = Buffers(engine.module)
    buffers.keep()
    lr = engine.lr
    try:
        yield
    finally:
        engine.lr = lr
        for module, training in modes:
            module.training = training
        buffers.put_back()
        for parameter in engine.parameters:
            parameter.grad = None
        restore_random_state(generators, engine.mesh)
