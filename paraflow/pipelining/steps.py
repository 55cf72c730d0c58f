"""A task's steps on a rank of a pipeline: in training, in evaluation and for predictions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paraflow.data.batch import map_tensors
from paraflow.loss import StepOutput, read_step
from paraflow.models.step import ShiftUnknown, loss_and_logits, remember_shift, shifts_labels
from paraflow.pipelining.absent import Meta
from paraflow.pipelining.executor import Executor
from paraflow.pipelining.layout import Layout
from paraflow.pipelining.orders import Schedule
from paraflow.pipelining.outputs import Sharing
from paraflow.pipelining.randomness import Randomness
from paraflow.pipelining.stage_state import StageState
from paraflow.pipelining.trace import Traffic
from paraflow.pipelining.traces import Traces
from paraflow.pipelining.values import rebuilt
from paraflow.pipelining.work import Inference, Training

if TYPE_CHECKING:
    from paraflow.data.batch import Batch
    from paraflow.engine import Engine

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class StageSteps(nn.Module):
    """A task's steps, of which this rank runs the stages that it has.

    Args:
        steps: The steps, called as ``steps(name, batch)``.
        engine: Whose steps they are.
        layout: The model in stages.
        schedule: The order in which stages run.
    """

    def __init__(self, steps: nn.Module, engine: Engine, layout: Layout, schedule: Schedule) -> None:
        super().__init__()
        self.steps = steps
        self._engine = engine
        self._replay = layout.replay
        self._stages = schedule.stages_of(engine.mesh.coordinate("pp"))
        self._executor = Executor(engine.mesh, schedule)
        self._sharing = Sharing(engine.mesh, schedule.places[-1])
        self._running: tuple[int, Sequence[torch.Tensor], Traffic] | None = None
        self._looking_at: nn.Module | None = None
        self._state = StageState(layout.replay, engine.mesh, schedule)

        def check(traffic: Traffic, again: Callable[[], Any]) -> None:
            layout.require_weights(layout.replay.weights_used_outside(traffic))
            self._state.expect(traffic, again)

        self._traces = Traces(layout.replay, engine.module, check)

    def forward(self, step: str, batch: Any) -> Any:
        """Runs the stage whose turn it is; where it is none's, all stages without gradients."""
        if self._running is not None:
            stage, received, traffic = self._running
            data = map_tensors(torch.clone, batch) if traffic.writes_batch else batch
            return self._replay.run(stage, partial(self.steps, step, data), received, traffic)
        with torch.no_grad():
            return self._infer(step, batch) if self._looking_at is None else self._look(self._looking_at, batch)

    def train_on(self, batch: Batch) -> list[StepOutput]:
        """Runs forward and backward of a step's micro-batches, and returns what each gave: the same on every rank."""
        engine = self._engine
        traffic = [self._traced_for_training(micro.data) for micro in batch.micro_batches]
        self._state.require_settled(len(traffic))
        with self._drawing() as randomness, self._state.step():

            def run(stage: int, index: int, data: Any, received: Sequence[torch.Tensor]) -> Any:
                turn = self._turn(stage, received, traffic[index])
                with self._state.stage(stage), randomness.micro_batch(stage, index), turn:
                    return engine.forward(data)

            work = Training(engine, batch, self._stages, run)
            self._executor.run(work, traffic)
        forms = [self._form(one, micro.samples) for one, micro in zip(traffic, batch.micro_batches, strict=True)]
        return self._sharing.step_outputs(forms, work.finished(), keep_outputs=engine.keep_outputs)

    def _traced_for_training(self, data: Any) -> Traffic:
        """What crosses in a training step, traced outside of what other plugins have put around it."""
        precision, device = _DTYPES.get(self._engine.plan.precision), self._engine.mesh.device.type

        def traced() -> Traffic:
            with nullcontext() if precision is None else torch.autocast(device, precision):
                return self._traces.of("training_step", data, partial(self._on_a_copy, "training_step"))

        try:
            return traced()
        except ShiftUnknown as found:
            unknown = found
        with self._in_place_of_the_step(unknown.module):
            self._find_shift(unknown.module, lambda: self._engine.forward(unknown.batch))
        return traced()

    def _on_a_copy(self, step: str, data: Any) -> Any:
        """Calls a step on a copy of a micro-batch, for it may write into it."""
        return self.steps(step, map_tensors(torch.clone, data))

    def _look(self, module: nn.Module, batch: Any) -> tuple[Traffic, Any]:
        """Runs what shows whether a model shifts its labels."""
        return self._run_forward((loss_and_logits, module), batch, partial(loss_and_logits, module))

    def _infer(self, step: str, data: Any) -> Any:
        """Returns what a step returns, on every rank: for predictions as it is, else by the contract of losses."""
        call = partial(self._on_a_copy, step)
        try:
            traffic, returned = self._run_forward(step, data, call)
        except ShiftUnknown as unknown:
            self._find_shift(unknown.module, partial(self._look, unknown.module, unknown.batch))
            traffic, returned = self._run_forward(step, data, call)
        here = self._sharing.is_source
        if step == "predict_step":
            return self._sharing.tensors(self._empty(traffic.returned), returned if here else None)
        given = [read_step(returned, samples=1)] if here else None
        form = self._form(traffic, samples=1)
        (output,) = self._sharing.step_outputs([form], given, keep_outputs=self._engine.keep_outputs)
        weight = {"weight": output.weight} if output.counted else {}
        return {"loss": output.loss, **weight, "output": output.output, "target": output.target, **output.values}

    def _run_forward(self, step: Hashable, data: Any, call: Callable[[Any], Any]) -> tuple[Traffic, Any]:
        """Runs all stages without gradients; what the call returns is there where the last stage is."""
        traffic = self._traces.of(step, data, call)
        with self._drawing() as randomness, self._state.step():

            def run(stage: int, index: int, data: Any, received: Sequence[torch.Tensor]) -> Any:
                with self._state.stage(stage), randomness.micro_batch(stage, index):
                    return self._replay.run(stage, partial(call, data), received, traffic)

            work = Inference(data, run)
            self._executor.forward_only(work, [traffic])
        return traffic, work.returned

    def _find_shift(self, module: nn.Module, look: Callable[[], tuple[Traffic, Any]]) -> None:
        """Finds out where values are whether a model shifts its labels, and has every rank know."""
        from paraflow.evaluation import inference

        with inference(self._engine.module), self._state.unchanged():
            _, returned = look()
        shifts = torch.zeros((), dtype=torch.int64, device=self._engine.mesh.device)
        if self._sharing.is_source:
            shifts += shifts_labels(module, *returned)
        remember_shift(module, bool(self._sharing.tensors(shifts, shifts)))

    @contextmanager
    def _in_place_of_the_step(self, module: nn.Module) -> Iterator[None]:
        self._looking_at = module
        try:
            yield
        finally:
            self._looking_at = None

    @contextmanager
    def _turn(self, stage: int, received: Sequence[torch.Tensor], traffic: Traffic) -> Iterator[None]:
        self._running = (stage, received, traffic)
        try:
            yield
        finally:
            self._running = None

    @contextmanager
    def _drawing(self) -> Iterator[Randomness]:
        replay, randomness = self._replay, Randomness(self._engine.mesh.device)
        before, replay.own_part = replay.own_part, randomness.own_part
        try:
            with randomness.step(self._engine.mesh.coordinate("pp")):
                yield randomness
        finally:
            replay.own_part = before

    def _form(self, traffic: Traffic, samples: int) -> StepOutput:
        """What a micro-batch's output is like: of its shapes, with memory that can be written to."""
        return read_step(self._empty(traffic.returned), samples)

    def _empty(self, form: Any) -> Any:
        device = self._engine.mesh.device
        return rebuilt(form, lambda meta: torch.zeros(meta.shape, dtype=meta.dtype, device=device), Meta)
