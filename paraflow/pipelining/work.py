"""What a rank computes in a pipeline: the user's own step, replayed stage by stage under an engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

from paraflow.data.batch import Batch
from paraflow.loss import StepOutput, read_step
from paraflow.step import Boundary, release_graph

if TYPE_CHECKING:
    from paraflow.engine import Engine
    from paraflow.pipelining.executor import Turn

Run = Callable[[int, int, Any, tuple[Tensor, ...]], Any]
"""Runs a stage on a micro-batch: (stage, index, data, received) to a `Boundary`, or on the last stage what the step
returns."""


class Training:
    """Forward and backward of a step's micro-batches.

    Args:
        engine: Whose step it is.
        batch: This rank's share of the batch.
        stages: The stages of this rank.
        run: Runs one of them, by way of `Engine.forward`.
    """

    def __init__(self, engine: Engine, batch: Batch, stages: tuple[int, ...], run: Run) -> None:
        self._engine = engine
        self._batch = batch
        self._first, self._last = stages[0], stages[-1]
        self._run = run
        self._outputs: list[StepOutput | None] = [None] * len(batch.micro_batches)

    def forward(self, stage: int, index: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Runs forward of a stage; the last one gives the weighted loss."""
        engine, micro = self._engine, self._batch.micro_batches[index]
        if stage == self._first:
            engine.forwards += 1
            for listener in engine.hooks.micro_batch_begin:
                listener()
        returned = self._run(stage, index, micro.data, received)
        if isinstance(returned, Boundary):
            return returned.tensors
        output = self._outputs[index] = read_step(returned, micro.samples)
        return (engine.weigh(output, self._batch),)

    def finished(self) -> list[StepOutput] | None:
        """Returns what each micro-batch gave, or None where this rank has not the last stage."""
        outputs = [output for output in self._outputs if output is not None]
        return outputs or None

    def around(self, turn: Turn) -> AbstractContextManager[object]:
        """Returns the context that plugins put around a forward or a backward."""
        return self._engine.around(turn.ordinal, turn.count, turn.part, turn.ends_stage)

    def before_backward(self, stage: int, index: int) -> None:
        """Calls who listens, once for each micro-batch on this rank."""
        if stage == self._last:
            for listener in self._engine.hooks.before_backward:
                listener()

    def after_backward(self, stage: int, index: int) -> None:
        """Calls who listens, and lets go of the graph."""
        output, hooks = self._outputs[index], self._engine.hooks
        if stage == self._last and output is not None:
            release_graph(output, keep_output=self._engine.keep_outputs)
        if stage == self._first:
            for listener in (*hooks.after_backward, *hooks.micro_batch_end):
                listener()


class Inference:
    """Forward of one micro-batch without gradients.

    Args:
        data: The micro-batch.
        run: Runs a stage.

    Attributes:
        returned: What the step returned, where this rank has the last stage.
    """

    def __init__(self, data: Any, run: Run) -> None:
        self._data = data
        self._run = run
        self.returned: Any = None

    def forward(self, stage: int, index: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Runs forward of a stage; nothing goes on from the last one."""
        returned = self._run(stage, index, self._data, received)
        if isinstance(returned, Boundary):
            return returned.tensors
        self.returned = returned
        return ()

    def around(self, turn: Turn) -> AbstractContextManager[object]:
        """Returns a context that does nothing."""
        return nullcontext()

    def before_backward(self, stage: int, index: int) -> None:
        """There is no backward."""

    def after_backward(self, stage: int, index: int) -> None:
        """There is no backward."""
