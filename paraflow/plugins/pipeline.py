"""Pipeline parallelism: each rank holds some of the layers, and micro-batches go through all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from paraflow.births import require_same_births
from paraflow.errors import ModelError, PlanError
from paraflow.loss import StepOutput
from paraflow.optim.kinds import has_step_hooks
from paraflow.optim.rehearsal import steps_by_parameter
from paraflow.plan import Plan
from paraflow.plan_memory import bytes_of
from paraflow.plugins.base import Phase, Plugin, State
from paraflow.rules import Rule

if TYPE_CHECKING:
    from paraflow.data.batch import Batch
    from paraflow.engine import Engine
    from paraflow.pipelining.layout import Layout
    from paraflow.pipelining.steps import StageSteps
    from paraflow.pipelining.ties import Ties

_COPIES = 4  # parameters, gradients, Adam's two averages

RULES = (
    Rule(
        "pipeline-compile",
        lambda f: f.plan.compile,
        "compile=True hands the whole model to torch.compile, and under a pipeline a rank runs only some of it.",
        "Leave compile out, and compile the blocks: for block in model.blocks: block.compile().",
    ),
)


class Pipeline(Plugin):
    """Stages of the model on ranks of their own, which pass micro-batches on to each other.

    Each rank runs the model's own step. What belongs to other stages has shapes and no values there, so any forward
    will do: lists of blocks, masks, encoders with decoders, skips over stages. Python code between the layers may look
    at shapes and at the batch, not at values that layers compute. Micro-batches are the plan's ``accumulate``.

    Stages are made of units: repeated blocks, the layers of a Sequential, and what is beside them. A parameter that
    several stages use (tied weights, and what belongs to no unit) is held by each, and trained as one.

    Args:
        degree: The number of ranks along the pipeline.
        schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved"``, ``"interleaved_zero_bubble"`` or ``"zbv"``.
        stages: The module names of each stage; or names, each of which begins a further stage. None balances the time.
        chunks: Stages on each rank.
        reshard: Whether FSDP lets go of parameters between micro-batches; else they stay gathered for a step.
        costs: The seconds that each unit takes, by name, as `paraflow.pipelining.unit_seconds` measures them; those of
            rank 0 count on all ranks. None estimates them from the weights.
        stage_memory: What the parameters of a rank's stages, their gradients and Adam's two averages may take
            (``"6GiB"``), before fsdp and tp divide it; balanced stages keep to it. None has no limit.
        shared: Parameters that all stages hold, by name or pattern: what a model uses outside of the layer they are in,
            where reading its code does not show it.

    Example:
        >>> Pipeline(2, schedule="gpipe").describe()
        "pipeline over 2 ranks, schedule 'gpipe'"
    """

    name = "pipeline"
    phase = Phase.STAGE
    provides = ("pp",)
    rules: ClassVar[tuple[Rule, ...]] = RULES

    def __init__(
        self,
        degree: int,
        *,
        schedule: str = "1f1b",
        stages: Sequence[str] | Sequence[Sequence[str]] | None = None,
        chunks: int = 1,
        reshard: bool = False,
        costs: Mapping[str, float] | None = None,
        stage_memory: str | int | None = None,
        shared: Sequence[str] = (),
    ) -> None:
        self.degree = degree
        self.schedule = schedule
        self.chunks = chunks
        self.reshard = reshard
        self._stages = _as_names(stages)
        self._costs = None if costs is None else dict(costs)
        self._stage_memory = stage_memory
        self._most_bytes = _parameter_bytes(stage_memory, chunks)
        self._shared = tuple(shared)
        self._layout: Layout | None = None
        self._ties: Ties | None = None
        self._steps: StageSteps | None = None
        self._micro_batches = 0
        self.rules = (*RULES, *_own_rules(schedule, degree, chunks, reshard=reshard))  # type: ignore[misc]  # known before launch, too

    @property
    def fields(self) -> Mapping[str, Any]:
        """The degree."""
        return {"pp": self.degree}

    def transform(self, module: nn.Module, engine: Engine) -> nn.Module:
        """Takes out of the model what other ranks run, and wraps the step so that it runs what is left."""
        mesh = engine.mesh
        if mesh.degree("pp") == 1:
            return module
        from paraflow.pipelining.layout import agreed_costs, laid_out_alike, lay_out
        from paraflow.pipelining.orders import Schedule
        from paraflow.pipelining.steps import StageSteps
        from paraflow.pipelining.ties import Ties

        self._micro_batches = engine.plan.accumulate
        require_same_births(engine.module, mesh, ("pp",))
        costs = agreed_costs(mesh, self._costs, self._cut_by)
        schedule = Schedule(self.schedule, self.degree, self.chunks)
        lay = partial(
            lay_out,
            engine.module,
            schedule,
            mesh.coordinate("pp"),
            mesh.device,
            stages=self._stages,
            costs=costs,
            shared=self._shared,
            most_bytes=self._most_bytes,
        )
        self._layout = laid_out_alike(mesh, lay)
        self._ties = Ties(engine.module, mesh, self._layout.holders(schedule.places))
        self._ties.give_values()
        self._steps = StageSteps(module, engine, self._layout, schedule)
        return self._steps

    @property
    def _cut_by(self) -> dict[str, Any]:
        """The arguments that ranks must have alike: all but the costs, which each may have measured."""
        return {
            "schedule": self.schedule,
            "chunks": self.chunks,
            "stages": self._stages,
            "shared": self._shared,
            "stage_memory": self._stage_memory,
        }

    def run_micro_batches(self, engine: Engine, batch: Batch) -> list[StepOutput]:
        """Runs a step's micro-batches through all stages; every rank has what they gave."""
        return engine.run_in_turn(batch) if self._steps is None else self._steps.train_on(batch)

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, engine: Engine) -> torch.optim.Optimizer:
        """Refuses an optimizer that looks at parameters together: it would see those of this rank's stages only.

        Raises:
            ModelError: It does, on any rank.
        """
        if self._ties is not None:
            self._require_by_parameter(optimizer, engine)
        return optimizer

    def _require_by_parameter(self, optimizer: torch.optim.Optimizer, engine: Engine) -> None:
        # A stage with one parameter, or none, cannot tell.
        if not engine.mesh.any(not steps_by_parameter(optimizer)):
            return
        name = type(optimizer).__name__
        raise ModelError(
            f"{name} cannot be applied to some parameters at a time: what it does to one depends on the others, or one "
            f"of its methods was replaced on it. Under pp={self.degree} each rank has those of its own stages. Use an "
            "optimizer that treats parameters one by one, such as adamw, and bound the norm of all gradients by "
            "Trainer(clip_norm=1.0)."
        )

    def step(self, engine: Engine, proceed: Callable[[], bool]) -> bool:
        """Adds up the gradients of what several stages hold.

        Replicas have averaged them by then: in other buckets on each stage, and so to other last bits, of which the sum
        makes one.

        Raises:
            ModelError: Something is called with the optimizer's step that may look at all gradients.
        """
        if self._ties is not None:
            if has_step_hooks(engine.optimizer):
                raise ModelError(
                    f"A hook is called with the step of {type(engine.optimizer).__name__}, and under pp={self.degree} "
                    "it sees the gradients of this rank's stages only. Bound their norm by Trainer(clip_norm=1.0); do "
                    "anything else in a callback (on_before_optimizer_step), where engine.gradient_norm() is that of "
                    "all stages."
                )
            self._ties.add_up()
        return proceed()

    def partitioned_over(self, name: str, parameter: nn.Parameter) -> Sequence[str] | None:
        """Returns ``pp``, or None for what an earlier stage holds as well."""
        if self._ties is None:
            return ()
        return ("pp",) if self._ties.counted_here(name) else None

    def state_dict(self, state: State, engine: Engine) -> State:
        """Returns the state of the whole model, in which something stands for what other stages hold."""
        return state if self._layout is None else self._layout.outline.with_the_rest(state)

    def load_state_dict(self, state: State, engine: Engine) -> State:
        """Returns what this rank holds of a state of the whole model."""
        return state if self._layout is None else self._layout.outline.without_the_rest(state, engine.module)

    def describe(self) -> str:
        """Returns a line for the printed plan: how the model is cut, once it is."""
        chunks = f" with {self.chunks} stages each" if self.chunks > 1 else ""
        said = [f"pipeline over {self.degree} ranks{chunks}, schedule {self.schedule!r}"]
        if self._layout is not None:
            said += self._layout.cut.describe()
        if 0 < self._micro_batches < self.degree:
            said.append(f"ranks wait for each other: write accumulate={2 * self.degree} or more")
        return "; ".join(said)


def _own_rules(schedule: str, degree: int, chunks: int, *, reshard: bool) -> Iterator[Rule]:
    """The rows for arguments that the plan's fields do not say."""
    from paraflow.pipelining.orders import why_not

    if reshard and schedule in ("interleaved_zero_bubble", "zbv"):
        yield Rule(
            "pipeline-reshard-halves",
            lambda f: f.plan.fsdp > 1 or f.plan.offloads_parameters,
            f"reshard=True lets go of parameters after the first half of a backward, and the second half that "
            f"schedule={schedule!r} has needs them.",
            "Leave reshard out, or write schedule='1f1b' or 'interleaved'.",
        )

    if schedule in ("interleaved_zero_bubble", "zbv"):
        yield Rule(
            "pipeline-recomputed-halves",
            lambda f: f.plan.activation_checkpointing is not None,
            f"schedule={schedule!r} runs backward in two halves, layer by layer, and each would run its block again.",
            "Leave activation_checkpointing out, or write schedule='1f1b' or 'interleaved'.",
        )
    refusal = why_not(schedule, degree, chunks)
    if refusal is not None:
        yield Rule(refusal.id, lambda f: True, _plain(refusal.reason), _plain(refusal.remedy))


def _plain(text: str) -> str:
    """Text that comes through format as it is."""
    return text.replace("{", "{{").replace("}", "}}")


def _parameter_bytes(stage_memory: str | int | None, chunks: int) -> float:
    """The bytes that the parameters of one stage may have, where so much is there for all that is kept of them."""
    if stage_memory is None:
        return math.inf
    return bytes_of(stage_memory, "stage_memory") / (_COPIES * chunks)


def _as_names(stages: Any) -> tuple[str, ...] | tuple[tuple[str, ...], ...] | None:
    """The names of modules that were given, as a plan in a file may say them, too."""
    if stages is None:
        return None
    if isinstance(stages, (list, tuple)):
        if all(isinstance(one, str) for one in stages):
            return tuple(stages)
        parts = [[one] if isinstance(one, str) else one for one in stages]
        if all(isinstance(part, (list, tuple)) and all(isinstance(one, str) for one in part) for part in parts):
            return tuple(map(tuple, parts))
    raise PlanError(
        "stages must be the module names of each stage, [['embedding', 'blocks.0'], ['blocks.1', 'head']], or the "
        f"names that begin a further stage, ['blocks.1'], not {stages!r}."
    )


def from_plan(plan: Plan, options: Mapping[str, Any]) -> Pipeline | None:
    """Returns the plugin that a plan asks for, or None."""
    return Pipeline(plan.pp, **options) if plan.pp > 1 else None
