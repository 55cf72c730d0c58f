"""The Trainer, which owns the loop.

    fit(model, train, val):
        make the plan, lay out the ranks, build the engine; restore what is resumed
        on_train_begin
        for each epoch:
            on_epoch_begin
            for each batch:
                on_step_begin
                    for each micro-batch:                               (in the engine)
                        on_micro_batch_begin, forward
                        on_before_backward, backward, on_after_backward, on_micro_batch_end
                    reduce, unscale, clip; on_before_optimizer_step, optimizer, schedule, on_after_optimizer_step
                on_step_end                                             (the step is counted)
                if validation is due: on_validation_begin, on_validation_end
                if the epoch is over: on_epoch_end                      (the epoch is counted)
                a signal stops all ranks here; on_checkpoint
        on_train_end

It knows no strategy: what a plan changes is in its plugins.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from paraflow import evaluation, seeding
from paraflow.callbacks.base import Callback
from paraflow.callbacks.dispatch import Dispatcher
from paraflow.checkpoint.run import save_now
from paraflow.data import Batch, Feed, Source, as_source, as_validation_source
from paraflow.dry_run import dry_run
from paraflow.engine import Engine
from paraflow.errors import ParaflowError
from paraflow.fitting import build_engine, fit_micro_batches, require_batch, require_same
from paraflow.history import History
from paraflow.interval import Interval
from paraflow.launch.environment import is_main
from paraflow.limits import Limits
from paraflow.logs import Logs
from paraflow.memory import explained, stepping
from paraflow.mesh import Mesh, choose_device
from paraflow.meters import step_means
from paraflow.models.metrics import MetricSet
from paraflow.models.task import Task
from paraflow.plan import PLAN_FIELDS, Plan
from paraflow.planner import Choice
from paraflow.plugins.base import Plugin
from paraflow.report import describe
from paraflow.resolve import Request
from paraflow.run import feed_of, make_run, metrics_of
from paraflow.settings import Settings
from paraflow.state import interrupted, restore, state_of
from paraflow.state import resume as resume_run
from paraflow.step import StepResult
from paraflow.verification import verify

if TYPE_CHECKING:
    from rich.console import Console


class Trainer:
    """Trains models, on this process or on all that were launched together, under one plan.

    Args:
        max_epochs: Epochs to train; 1 where neither this nor `max_steps` is given.
        max_steps: Optimizer steps to train; the first of the two to come ends the run.
        dp, fsdp, tp, pp, ep, cp: Degrees of parallelism; dp fills the world where it is left out. `paraflow.Plan` has
            more on these and what follows.
        accumulate: Micro-batches for one optimizer step.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        comm_hook: ``"bf16"`` or ``"fp16"``: what gradients are communicated in.
        zero, activation_checkpointing, memory_budget, cpu_offload, apply_groups: What saves memory.
        compile, clip_norm: Whether torch.compile is used; a bound on the global gradient norm.
        optimizer_implementation: ``"fused"``, ``"foreach"``, ``"for-loop"`` or ``"default"``.
        auto: ``"O1"`` fills what was left out, and says why.
        plugins: Strategies in detail, the package's or your own.
        plan: A plan, or the path of a YAML file with one.
        seed: Seeds the order of samples, and on each data rank what is random in training.
        deterministic: Whether torch is held to deterministic algorithms.
        device: ``"auto"``, or a torch device.
        callbacks, loggers: Called at events, in this order; loggers are callbacks that write numbers.
        progress: Whether the plan and the progress are printed (by rank 0).
        val_every: How often `fit` validates: ``"1ep"``, steps, or time.
        stall_timeout: After so long without a sign of life, a run in which ranks wait for another is ended, and who is
            waited for is named (a tenth of it earlier, too); None waits for ever.
        debug: Whether ranks compare each collective before it runs, and every 10 steps (or so many) their parameters.
        dry_run: Whether `fit` runs two steps of everything, saves and restores, then undoes it.
        overfit: Train and validate on so many batches only, the same in every epoch, to see that they can be learnt.
        preempt_signal: A signal, such as ``"SIGUSR1"``, that stops the run as SIGTERM does: saved, at a step boundary.

    Attributes:
        is_main: Whether this is rank 0, which prints and writes.
        request, device: What was asked for: the plan as far as it was said, and the device.
        limits: When the run ends.
        chooses_accumulation: Whether ``auto`` chooses the number of micro-batches.
        step: Optimizer steps that are done: the only counter of schedules, logs and checkpoints.
        epoch: Epochs that are complete.
        current_epoch: The epoch that is running, or has just ended, from 0.
        epoch_complete: Whether the last step ended its epoch.
        steps_per_epoch, total_steps: Steps of an epoch and of the run; None where the data does not say.
        history: The numbers of each epoch so far.
        run: The feeds and meters of the fit.
        dispatcher: The callbacks, by event.
    """

    def __init__(
        self,
        *,
        max_epochs: int | None = None,
        max_steps: int | None = None,
        dp: int | None = None,
        fsdp: int | None = None,
        tp: int | None = None,
        pp: int | None = None,
        ep: int | None = None,
        cp: int | None = None,
        accumulate: int | None = None,
        precision: str | None = None,
        comm_hook: str | None = None,
        zero: int | None = None,
        activation_checkpointing: str | Sequence[str] | None = None,
        memory_budget: str | int | None = None,
        cpu_offload: str | float | Sequence[str] | None = None,
        apply_groups: int | str | None = None,
        compile: bool | None = None,
        clip_norm: float | None = None,
        optimizer_implementation: str | None = None,
        auto: str | None = None,
        plugins: Sequence[Plugin] = (),
        plan: Plan | str | Path | None = None,
        seed: int = 0,
        deterministic: bool = False,
        device: str = "auto",
        callbacks: Sequence[Callback] = (),
        loggers: Sequence[Callback] = (),
        progress: bool = True,
        val_every: Interval | str | int = "1ep",
        stall_timeout: Interval | str | None = "10min",
        preempt_signal: str | None = None,
        debug: bool | int = False,
        dry_run: bool = False,
        overfit: int | None = None,
    ) -> None:
        arguments = locals()
        said = {name: arguments[name] for name in PLAN_FIELDS if arguments.get(name) is not None}
        self.request = Request(flags=said, plugins=tuple(plugins), plan=plan, auto=auto)
        self.chooses_accumulation = self.request.chooses("accumulate")
        self.limits = Limits.of(max_epochs, max_steps)
        self.seed, self.device, self.progress, self.is_main = seed, device, progress, is_main()
        self._settings = Settings.of(
            val_every, stall_timeout, preempt_signal, debug=debug, dry_run=dry_run, overfit=overfit
        )
        listeners = self._settings.listeners(callbacks, loggers, progress=progress)
        self.dispatcher = Dispatcher(self, listeners, self._settings.silent)
        self._engine: Engine | None = None
        self._choices: list[Choice] = []
        self._reset()
        if deterministic:
            seeding.make_deterministic()

    def _reset(self) -> None:
        self.step = self.epoch = self.current_epoch = 0
        self.epoch_complete = False
        self.steps_per_epoch: int | None = None
        self.total_steps: int | None = None
        self.history = History()
        self._stopping = self._asked_to_stop = False
        self.dispatcher.between_steps = True

    @property
    def engine(self) -> Engine:
        """The engine of the model that was trained or evaluated last."""
        if self._engine is None:
            raise ParaflowError("The Trainer has no model yet; call fit, evaluate or predict first.")
        return self._engine

    @property
    def plan(self) -> Plan:
        """The plan of the current model."""
        return self.engine.plan

    @property
    def mesh(self) -> Mesh:
        """The ranks, laid out by the plan."""
        return self.engine.mesh

    @property
    def callbacks(self) -> tuple[Callback, ...]:
        """The callbacks, in the order in which they are called."""
        return tuple(self.dispatcher.callbacks)

    @cached_property
    def console(self) -> Console:
        """Where progress is printed."""
        from rich.console import Console

        return Console()

    def fit(
        self,
        model: nn.Module,
        train: Any,
        val: Any = None,
        batch_size: int | None = None,
        resume: str | Path | None = None,
    ) -> History:
        """Trains a model.

        Args:
            model: A `paraflow.Model`, or any module; see `paraflow.configure`.
            train: Arrays, a dataset, a DataLoader, an iterable of batches, or a function that returns one.
            val: The same, to validate on.
            batch_size: Samples of one optimizer step over all ranks; for arrays and datasets 32 where it is left out.
            resume: A checkpoint, a folder of them, or ``"auto"``: the newest that the run's own Checkpoint callback has
                written, if any.

        Returns:
            The numbers of each epoch.

        Raises:
            ParaflowError: Something that was given cannot be used; raised before training where it can be known.
        """
        source = as_source(train, batch_size=batch_size, shuffle=True, name="training data")
        val_source = None if val is None else as_validation_source(val, batch_size)
        source, val_source = self._settings.limited(source, val_source)
        self._reset()
        self._engine, self._choices = self._engine_of(model, source.batch_size)
        require_same(self.engine, self.dispatcher.signature(), source)
        choices = [*self._choices, *fit_micro_batches(self.engine, self.request, source)]
        self._print(*describe(self.engine, choices, source))
        self._begin_run(source, val_source)
        if resume is not None:
            self._print(*resume_run(self, resume))
        try:
            with self._settings.watch(self.engine) as self._watch, explained(self):
                if self._settings.dry_run:
                    return dry_run(self, self._train, self._print)
                self._train()
                signal = self._watch.stopped_after_the_last()
        except BaseException as error:
            self.dispatcher.fire("on_exception", {"exception": error})
            raise
        if signal is not None:
            raise interrupted(self, signal)
        return self.history

    def _engine_of(self, model: nn.Module, batch_size: int | None = None) -> tuple[Engine, list[Choice]]:
        """Returns the engine of a model, made anew unless it is there already, and what ``auto`` chose for it."""
        task = Task(model)
        if self._engine is None or not self._engine.serves(task):
            return build_engine(task, self.request, choose_device(self.device), batch_size)
        require_batch(self._engine, batch_size)
        return self._engine, self._choices

    def _begin_run(self, source: Source, val_source: Source | None) -> None:
        self.steps_per_epoch, self.total_steps = source.length, self.limits.total_steps(source.length)
        self.engine.hooks, self.engine.say = self.dispatcher.step_hooks(), self._print
        self.engine.prepare_optimizer(self.total_steps)
        self.run = make_run(self.engine, source, val_source, self.seed, self._settings.val_every)
        self.engine.keep_outputs = bool(self.run.metrics)
        seeding.reseed(self.seed + self.mesh.data_rank)

    def _train(self) -> None:
        if not self.engine.module.training:  # parts that were set to evaluation by themselves stay so
            self.engine.module.train()
        self.dispatcher.start(self.step, self.mesh.agree)
        self.run.start(self.step)
        self._watch.start(self.step)
        self.dispatcher.fire("on_train_begin")
        self._train_step = stepping(self, self._watch, self._print)
        self._agree_to_stop()
        while not self.finishing:
            self._train_epoch()
        self.dispatcher.fire("on_train_end")

    def _train_epoch(self) -> None:
        run, fire = self.run, self.dispatcher.fire
        self.current_epoch = run.feed.epoch
        fire("on_epoch_begin")
        for batch in run.feed:
            fire("on_step_begin")
            result = self._train_step(batch)
            self.step += 1
            self.epoch = run.feed.epoch
            self.epoch_complete = batch.last
            self._after_step(self.engine.batch, result)
            validated = self._validate() if run.val_trigger.at_step(self.step) else None
            ended = batch.last or self.finishing
            if ended:
                self._end_epoch(validated)
            signal = self._watch.stopped(self.step)
            self._stopping |= signal is not None
            fire("on_checkpoint")
            if signal is not None:
                raise interrupted(self, signal)
            if ended:
                return

    def _after_step(self, batch: Batch, result: StepResult) -> None:
        self.run.measure(batch, result)
        due = self.dispatcher.due(self.step)
        if not due:
            return
        norm = {} if result.norm is None else {"grad_norm": result.norm}
        logs = Logs(step_means(result, self.mesh), lr=self.engine.lr, **norm)
        for method in due:
            method(self, logs)
        self._agree_to_stop()

    def _end_epoch(self, validated: dict[str, float] | None) -> None:
        logs: dict[str, Any] = {**self.run.compute(), "lr": self.engine.lr}
        self.history.note(self.step, logs)
        if validated is None and (self.run.val_trigger.at_epoch(self.current_epoch + 1) or self.finishing):
            validated = self._validate()
        logs.update(validated or {})
        self.history.add(self.current_epoch, logs)
        if self.epoch_complete:
            self.run.reset()
        self.dispatcher.fire("on_epoch_end", logs)
        self._agree_to_stop()

    def _validate(self) -> dict[str, float]:
        if self.run.val_feed is None:
            return {}
        logs = self._evaluate(self.engine, self.run.val_feed, self.run.val_metrics)
        self.history.note(self.step, logs)
        self._agree_to_stop()
        return logs

    def _evaluate(self, engine: Engine, feed: Feed, metrics: MetricSet) -> dict[str, float]:
        self.dispatcher.fire("on_validation_begin")
        logs = {f"val_{name}": value for name, value in evaluation.evaluate(engine, feed, metrics).items()}
        self.dispatcher.fire("on_validation_end", logs)
        return logs

    def _agree_to_stop(self) -> None:
        self._stopping = self.mesh.any(self._asked_to_stop)

    @property
    def finishing(self) -> bool:
        """Whether the run ends with the step that was made last."""
        return self._stopping or self.limits.reached(self.epoch, self.step)

    @property
    def validates(self) -> bool:
        """Whether the run has validation data."""
        return self.run.val_feed is not None

    def stop(self) -> None:
        """Asks for the run to end, from one rank or all: when the ranks next agree, after a callback, or an epoch."""
        self._asked_to_stop = True

    def evaluate(self, model: nn.Module, data: Any, batch_size: int | None = None) -> dict[str, float]:
        """Returns loss and metrics of a model over data, of whatever kind `fit` takes, each sample counted once."""
        engine, feed = self._reading(model, data, batch_size, "data to evaluate")
        with self._settings.watch_reading(engine):
            logs = self._evaluate(engine, feed, metrics_of(engine))
        return {name.removeprefix("val_"): value for name, value in logs.items()}

    def predict(self, model: nn.Module, data: Any, batch_size: int | None = None) -> Any:
        """Returns a model's outputs over data, in the order of the data, on every rank; targets are passed over."""
        engine, feed = self._reading(model, data, batch_size, "data to predict")
        self.dispatcher.fire("on_predict_begin")
        with self._settings.watch_reading(engine):
            outputs = evaluation.predict(engine, feed)
        self.dispatcher.fire("on_predict_end")
        return outputs

    def _reading(self, model: nn.Module, data: Any, batch_size: int | None, name: str) -> tuple[Engine, Feed]:
        source = as_source(data, batch_size=batch_size, shuffle=False, name=name)
        engine, choices = self._engine_of(model)
        if self._engine is None:
            self._engine, self._choices = engine, choices
        return engine, feed_of(engine, source, self.seed, name)

    verify = verify

    def save(self, folder: str | Path) -> None:
        """Saves the run as a checkpoint; every rank calls it, between two steps: in `on_checkpoint`, or after `fit`."""
        if not hasattr(self, "run"):
            raise ParaflowError("There is no run to save yet; call fit first.")
        save_now(self.state_dict(), self.mesh, Path(folder))

    def state_dict(self) -> dict[str, Any]:
        """Returns the run's state, all but random state, as one device would hold it: a collective."""
        return state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up a run's state, saved under whatever plan."""
        restore(self, state)

    def _print(self, *lines: str) -> None:
        if self.progress and self.is_main:
            self.console.print(*lines, sep="\n", highlight=False, soft_wrap=True)
