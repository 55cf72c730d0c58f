"""The engine: a model under a plan.

    train_step(batch):
        clear gradients
        for each micro-batch:  forward, weigh the loss, backward        (or as a plugin runs them)
        reduce gradients over the ranks, correct their normalisation
        step: each plugin in turn, then the optimizer and its schedule

It composes the plugins' methods once, when it is built; a method that no plugin overrides is not called. It knows no
strategy by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from paraflow.births import births_of
from paraflow.data.batch import Batch, MicroBatch
from paraflow.errors import ModelError
from paraflow.gradients import Gradients
from paraflow.loss import StepOutput, read_step, require_no_gradient_of_nothing
from paraflow.mesh import Mesh
from paraflow.models.task import Task
from paraflow.normaliser import Normaliser
from paraflow.optim.stand_ins import follow
from paraflow.optim.state import load_optimizer_state, optimizer_state
from paraflow.optim.update import Update
from paraflow.outline import as_loaded, outline_of, tensors_of_the_whole
from paraflow.parts import is_spread, part_for
from paraflow.placing import place
from paraflow.plan import Plan
from paraflow.plugins.base import Part, Phase, Plugin, State, in_order
from paraflow.step import StepAbandoned, StepHooks, StepResult, release_graph
from paraflow.trained import has_the_same, require_none_new, trained_parts


class _Steps(nn.Module):
    """A task's steps as one module, so that a plugin can wrap how all of them are called."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.module = task.module
        self._recipe = task.recipe
        self._task = (task,)

    def forward(self, step: str, batch: Any) -> Any:
        return getattr(self._task[0], step)(batch)


class Engine:
    """Runs a model's steps under a plan.

    Args:
        task: The model.
        mesh: The ranks, laid out by the plan.
        plugins: What the plan is made of.

    Attributes:
        task: The model, seen as something that can be trained.
        module: The user's own module; its parameters keep their names under every plan.
        mesh: The ranks.
        plan: The plan.
        trained: The names of the parameters that are trained.
        shapes: The shapes of parameters and buffers by name, as one device holds them.
        parameters: The parameters that are trained, as the plugins left them; they may be spread over ranks.
        optimizer: The optimizer; there once `prepare_optimizer` has run.
        update: How the optimizer is applied: a plugin may give it other tensors to hold than the parameters.
        schedule: The learning-rate schedule, or None.
        partition_dims: The mesh dimensions over which ranks hold different parts of the parameters.
        last_norm: The gradient norm of the current step, where a plugin measured it.
        lr: The learning rate of the last step.
        batch: This rank's share of the batch that is trained on, or was last.
        run_micro_batch: Runs forward and backward of one micro-batch; what stands around it may be put in its place.
        abandons: Asked between a step's gradients and its optimizer: whether the step is given up.
        forwards: Micro-batches whose forward has begun, in training and without gradients: a sign of life.
        keep_outputs: Whether a step's outputs and targets are kept for metrics.
        hooks: What is called while a step runs.
        say: Prints a line on rank 0, where the run prints.
    """

    optimizer: torch.optim.Optimizer
    update: Update
    batch: Batch

    def __init__(self, task: Task, mesh: Mesh, plugins: Sequence[Plugin]) -> None:
        self.task = task
        self.module = task.module
        self._recipe = task.recipe
        self.mesh = mesh
        self.plan: Plan = mesh.plan
        self.plugins = in_order(plugins)
        self.hooks = StepHooks()
        self.schedule: torch.optim.lr_scheduler.LRScheduler | None = None
        self.last_norm: torch.Tensor | None = None
        self.lr = 0.0
        self.keep_outputs = True
        self.run_micro_batch: Callable[[MicroBatch, Batch], StepOutput] = self._forward_backward
        self.abandons: Callable[[], bool] | None = None
        self.forwards = 0
        self.say: Callable[[str], None] = lambda line: None
        self._normaliser = Normaliser(mesh)
        self._place_model()
        self._compose()

    def serves(self, task: Task) -> bool:
        """Whether this is the engine of a task as it is now: the same module and parameters, trained in the same way.

        Raises:
            ModelError: The module's parts differ, and a plugin has replaced parameters by this rank's part of them.
        """
        if task.module is not self.module:
            return False
        if self.partition_dims and not has_the_same(task.module, self._known):
            # What a step that was broken off has left in their place is let go of.
            self._as_a_rank({"model": {}, "plugins": {}})
        same = self.trained == trained_parts(task.module) and task.recipe is self._recipe
        same = same and has_the_same(task.module, self._known)
        if not same and self.partition_dims:
            raise ModelError(
                f"{type(self.module).__name__} was changed (frozen, unfrozen, configured anew or given other "
                "parameters) after a plan spread it over ranks. Change it before the first fit, evaluate or predict."
            )
        return same

    @property
    def runs_in_turn(self) -> bool:
        """Whether micro-batches are run one after another, each forward followed by its backward."""
        return not self._overriding("run_micro_batches")

    def _place_model(self) -> None:
        given = self._recipe.optimizer if isinstance(self._recipe.optimizer, torch.optim.Optimizer) else None
        before = {} if given is None else dict(self.module.named_parameters())  # else replaced parameters can go
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors_of_the_whole(self.module).items()}
        spread = any(is_spread(p) for p in self.module.parameters()) and not self._overriding("partitioned_over")
        staged = outline_of(self.module) is not None and all(plugin.phase > Phase.STAGE for plugin in self.plugins)
        if spread or staged:
            raise ModelError(
                f"{type(self.module).__name__} has been spread over ranks by an earlier Trainer, and this plan "
                f"({self.plan}) takes it whole. Use the same plan, or make the model anew and load its state."
            )
        births = births_of(self.module)
        steps: nn.Module = _Steps(self.task)
        wrapping = [plugin for plugin in self.plugins if plugin.overrides("transform")]
        for plugin in [plugin for plugin in wrapping if plugin.phase <= Phase.PARTITION]:
            steps = plugin.transform(steps, self)
        # Parts first, values then: a model that fits on no device is never whole on one.
        place(self.module, births, self.mesh.device)
        for plugin in [plugin for plugin in wrapping if plugin.phase > Phase.PARTITION]:
            steps = plugin.transform(steps, self)
        self._known = dict(self.module.named_parameters())
        self._has_stepped = False
        if given is not None:
            follow(given, before, self._known)
        self._call: Callable[[str], Callable[[Any], Any]] = (
            (lambda step: partial(steps, step)) if wrapping else (lambda step: getattr(self.task, step))
        )
        self._training_step = self._call("training_step")
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.trained = trained_parts(self.module)
        trained = ((name, p) for name, p in self.module.named_parameters() if p.requires_grad)
        self._gradients = Gradients(trained, self.mesh, self._overriding("partitioned_over"))
        self.partition_dims = self._gradients.dims

    def _compose(self) -> None:
        self._calibrations = [plugin.calibrate for plugin in self._overriding("calibrate")]
        self._contexts = self._overriding("micro_batch")
        self._scalings = [plugin.scale_loss for plugin in self._overriding("scale_loss")]
        self._may_overflow = any(plugin.may_overflow for plugin in self.plugins)
        self._reductions = [plugin.reduce_gradients for plugin in self._overriding("reduce_gradients")]
        runner = next(iter(self._overriding("run_micro_batches")), None)
        self._run = self.run_in_turn if runner is None else partial(runner.run_micro_batches, self)
        proceed: Callable[[], bool] = self._apply
        for plugin in reversed(self._overriding("step")):
            proceed = partial(plugin.step, self, proceed)
        self._step = proceed

    def _overriding(self, method: str) -> list[Plugin]:
        return [plugin for plugin in self.plugins if plugin.overrides(method)]

    def prepare_optimizer(self, total_steps: int | None) -> None:
        """Builds the optimizer and its schedule anew, over the parameters as the plugins left them.

        Raises:
            ModelError: There is nothing to train.
        """
        if not self.parameters and outline_of(self.module) is None:
            raise ModelError(
                f"{type(self.module).__name__} has nothing to train: no parameter of it requires a gradient. "
                "Call requires_grad_(True) on what should be trained."
            )
        optimizer, self.schedule = self.task.build_optimizer(total_steps)
        self.update = Update(optimizer, dict(self.module.named_parameters()))
        for plugin in self._overriding("wrap_optimizer"):
            optimizer = plugin.wrap_optimizer(optimizer, self)
        self.optimizer = self.update.optimizer = optimizer
        self.lr = optimizer.param_groups[0]["lr"]

    def train_step(self, batch: Batch) -> StepResult:
        """Runs one optimizer step on this rank's share of a batch.

        Raises:
            StepAbandoned: `abandons` gave it up.
            ModelError: The first step has made parameters.
        """
        for parameter in self.parameters:
            parameter.grad = None
        self.batch = batch
        self.last_norm = None
        while self._calibrations:
            self._calibrations.pop(0)(self, batch)
        self._normaliser.begin(batch)
        outputs = self._run(batch)
        for reduce in self._reductions:
            reduce(self)
        if not self._may_overflow:
            require_no_gradient_of_nothing(outputs, self.gradients)
        correction = self._normaliser.correction(outputs, batch)
        if correction is not None:
            self.scale_gradients(correction)
        if self.abandons is not None and self.abandons():
            raise StepAbandoned
        if not self._has_stepped:
            require_none_new(self.module, self._known)
        stepped = self._step()
        self._has_stepped = True
        return StepResult(outputs, self._normaliser.totals, self.last_norm, stepped)

    def run_in_turn(self, batch: Batch) -> list[StepOutput]:
        """Runs forward and backward of the micro-batches one after another."""
        count = len(batch.micro_batches)
        if not self._contexts:
            return [self.run_micro_batch(micro, batch) for micro in batch.micro_batches]
        outputs = []
        for index, micro in enumerate(batch.micro_batches):
            with self.around(index, count):
                outputs.append(self.run_micro_batch(micro, batch))
        return outputs

    @contextmanager
    def around(self, index: int, count: int, part: Part = "both", last: bool | None = None) -> Iterator[None]:
        """The context that plugins put around a micro-batch, or its forward or backward (`Plugin.micro_batch`).

        ``last`` may be left out where a rank runs all of its layers for each micro-batch.
        """
        last = index == count - 1 if last is None else last
        with ExitStack() as stack:
            for plugin in self._contexts:
                context: AbstractContextManager[Any] = plugin.micro_batch(index, count, part, last)
                stack.enter_context(context)
            yield

    def _forward_backward(self, micro: MicroBatch, batch: Batch) -> StepOutput:
        hooks = self.hooks
        self.forwards += 1
        for listener in hooks.micro_batch_begin:
            listener()
        output = read_step(self._training_step(micro.data), micro.samples)
        loss = self.weigh(output, batch)
        for listener in hooks.before_backward:
            listener()
        loss.backward()  # type: ignore[no-untyped-call]
        for listener in hooks.after_backward:
            listener()
        release_graph(output, keep_output=self.keep_outputs)
        for listener in hooks.micro_batch_end:
            listener()
        return output

    def weigh(self, output: StepOutput, batch: Batch) -> torch.Tensor:
        """Returns what backward starts from: the loss, weighted for the whole batch and scaled by the plugins.

        Raises:
            ModelError: No parameter had a part in the loss.
        """
        if not output.loss.requires_grad:
            raise ModelError(
                "The loss does not depend on any parameter that requires a gradient; return it from the step as "
                "computed, not detached, and not under torch.no_grad."
            )
        factor = self._normaliser.factor(output, batch)
        loss = output.loss if isinstance(factor, float) and factor == 1.0 else output.loss * factor
        for scale in self._scalings:
            loss = scale(loss)
        return loss

    def forward(self, data: Any) -> Any:
        """Returns what the training step gives for a micro-batch's data: a forward without anything around it."""
        return self._training_step(data)

    def eval_step(self, micro: MicroBatch) -> StepOutput:
        """Runs forward of a micro-batch in evaluation; the caller turns off gradients and training mode."""
        self.forwards += 1
        return read_step(self._call("validation_step")(micro.data), micro.samples)

    def predict_step(self, micro: MicroBatch) -> Any:
        """Returns the model's output for a micro-batch; the caller turns off gradients and training mode."""
        self.forwards += 1
        return self._call("predict_step")(micro.data)

    def gradients(self) -> list[torch.Tensor]:
        """Returns the gradients there are, in the order of the parameters: this rank's part of each."""
        return self._gradients.local()

    def scale_gradients(self, factor: torch.Tensor) -> None:
        """Multiplies every gradient by a number, a 0-dim tensor."""
        self._gradients.scale(factor)

    def gradient_norm(self) -> torch.Tensor:
        """Returns the norm of the whole gradient, over every parameter and every rank that holds a part: 0-dim."""
        return self._gradients.norm()

    def _apply(self) -> bool:
        for listener in self.hooks.before_optimizer_step:
            listener()
        self.lr = _number(self.optimizer.param_groups[0]["lr"])
        self.update()
        if self.schedule is not None:
            self.schedule.step()
        for listener in self.hooks.after_optimizer_step:
            listener()
        return True

    def state_dict(self) -> State:
        """Returns parameters, optimizer, schedule and the plugins' own, as one device would hold them.

        What a plan has spread over ranks is there as such tensors (`paraflow.parts`): nothing is gathered for it.
        """
        state: State = {"model": dict(self.module.state_dict()), "plugins": {}}
        if hasattr(self, "optimizer"):
            state["optimizer"] = optimizer_state(self.update)
            state["schedule"] = None if self.schedule is None else self.schedule.state_dict()
        return self._as_one_device(state)

    def model_state(self) -> State:
        """Returns the model's part of the state alone: tensors by name."""
        model: State = self._as_one_device({"model": dict(self.module.state_dict()), "plugins": {}})["model"]
        return model

    def _as_one_device(self, state: State) -> State:
        for plugin in reversed(self._overriding("state_dict")):
            state = plugin.state_dict(state, self)
        return state

    def load_state_dict(self, state: State) -> None:
        """Takes up a state that any plan may have saved; of tensors on disk only this rank's part is read."""
        state = self._as_a_rank(state)
        own = self.module.state_dict(keep_vars=True)
        values = {k: _value_for(v, own.get(k)) for k, v in state["model"].items()}
        self.module.load_state_dict(as_loaded(self.module, values))
        if hasattr(self, "optimizer") and "optimizer" in state:
            load_optimizer_state(self.update, state["optimizer"])
            if self.schedule is not None and state["schedule"] is not None:
                self.schedule.load_state_dict(state["schedule"])
            self.lr = self.optimizer.param_groups[0]["lr"]

    def load_model_state(self, model: Mapping[str, Any]) -> None:
        """Takes up some of the model's tensors by name, as any plan may have saved them; the others stay as they are.

        Raises:
            KeyError: The model has no tensor of a name.
        """
        state, own = self._as_a_rank({"model": dict(model), "plugins": {}}), self.module.state_dict(keep_vars=True)
        self.module.load_state_dict({k: _value_for(v, own[k]) for k, v in state["model"].items()}, strict=False)

    def _as_a_rank(self, state: State) -> State:
        for plugin in self._overriding("load_state_dict"):
            state = plugin.load_state_dict(state, self)
        return state


def _value_for(value: Any, own: Any) -> Any:
    """What a module is given of a value: for a tensor this rank's part of it."""
    return part_for(value, own.detach()) if isinstance(own, torch.Tensor) else value


def _number(lr: Any) -> Any:
    """A learning rate as it is now: a schedule changes one that is a tensor in place."""
    return lr.clone() if isinstance(lr, torch.Tensor) else lr
