"""Fully sharded data parallelism on torch's ``fully_shard``: ranks share out parameters, gradients, optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from paraflow.births import require_same_births
from paraflow.errors import ModelError, PlanError
from paraflow.optim.kinds import is_elementwise
from paraflow.outline import tensors_of_the_whole
from paraflow.parts import is_spread, local
from paraflow.plan import DATA_DEGREES, Plan
from paraflow.plan_memory import as_text
from paraflow.plugins.base import Part, Phase, Plugin, State
from paraflow.plugins.cpu_offload import chosen_units
from paraflow.plugins.gathered import Gathered, gathered_bytes
from paraflow.plugins.sharding import Entrance, Layout, Sharding, is_sharded, same_everywhere, shard
from paraflow.plugins.units import Asked, Unit, bytes_gathered, find_units, rest_of
from paraflow.plugins.usage import Usage
from paraflow.rules import Rule

if TYPE_CHECKING:
    from paraflow.engine import Engine
    from paraflow.optim.update import Held

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_OPTIMIZER_COPIES = 2  # AdamW: two moments, as large as the parameters

RULES = (
    Rule(
        "fsdp-without-degree",
        lambda f: f.plan.fsdp == 1 and f.world_size > 1 and not f.plan.offloads_parameters,
        "The plugin FSDP was given, and the plan's fsdp is 1, by which nothing would be sharded.",
        "Write FSDP({f.world_size}) or fsdp={f.world_size}, or leave the plugin out.",
    ),
    Rule(
        "fsdp-is-data-parallel",
        lambda f: "data_parallel" in f.plugins,
        "The plugin DataParallel was given, and FSDP averages the gradients of dp={f.plan.dp} × fsdp={f.plan.fsdp} by "
        "itself (hybrid sharding).",
        "Leave DataParallel out, and write dp={f.plan.dp}, fsdp={f.plan.fsdp}.",
    ),
)


def _own_rules(
    reduce: str | None, shards: bool | int | None, gather_dtype: str | None, *, mixed: bool
) -> Iterator[Rule]:
    """The rows for arguments that the plan's fields do not say."""
    if mixed:
        yield Rule(
            "fsdp-unused-in-turn",
            lambda f: bool(f.runners),
            "find_unused_parameters=True has ranks agree on what each micro-batch uses before its backward, and "
            "{f.runners} runs micro-batches in another order.",
            "Leave one of them out.",
        )
    if gather_dtype is not None:
        yield Rule(
            "fsdp-gather-dtype",
            lambda f: f.plan.precision != gather_dtype,
            f"gather_dtype={gather_dtype!r} gathers weights for matrix products in it, and the plan's precision is "
            "{f.plan.precision!r}.",
            f"Write precision={gather_dtype!r} too.",
        )
    if reduce == "last":
        yield Rule(
            "fsdp-comm-hook",
            lambda f: f.plan.comm_hook is not None and f.plan.accumulate > 1,
            "With reduce='last' torch would add up the gradients of {f.plan.accumulate} micro-batches in "
            "{f.plan.comm_hook}.",
            "Write reduce='each', or leave comm_hook out.",
        )
    if shards is not None and not isinstance(shards, bool):
        yield Rule(
            "fsdp-reshard-divides",
            lambda f: not 1 < shards < f.plan.fsdp or f.plan.fsdp % shards != 0,
            f"reshard_after_forward={shards} must divide fsdp={{f.plan.fsdp}} and be neither 1 nor all of it.",
            "Write such a number, or True or False.",
        )


class FSDP(Plugin):
    """Shards a model over ranks; units of it are gathered when they are used.

    With ``dp`` > 1 the shards are replicated: hybrid sharding. Parameters that the plan keeps on the host
    (``cpu_offload``) are gathered from there, also over one rank.

    Under autocast torch keeps the half-precision copy of each weight that backward needs, so a gathered weight is
    held longer than the unit runs. ``gather_dtype`` avoids that: the weight that is gathered is the copy.

    Args:
        degree: The number of shards; None is what the plan says.
        zero: What is sharded between uses: 1 the optimizer's state, 2 the gradients too, 3 the parameters too; None is
            what the plan says. Under 1 and 2 the parameters are gathered once a step.
        units: What is gathered together: module classes, names or patterns such as ``"blocks.*"``; None finds repeated
            blocks and large layers.
        reduce: When gradients are reduced: ``"each"`` micro-batch (a rank keeps shards) or with the ``"last"`` one (a
            rank keeps whole gradients, and communicates once a step). None is ``"last"`` for zero 1, else ``"each"``.
        reshard_after_forward: Whether a unit is let go of between its forward and its backward, or the number of ranks
            it is sharded over meanwhile; None is True for zero 3, else False.
        gather_dtype: ``"bf16"`` or ``"fp16"``, as the plan's precision: parameters are gathered in it. Gradients are
            still reduced and added up in fp32.
        find_unused_parameters: Whether ranks may use different parameters in a step. It costs a walk of the graph and a
            small message a micro-batch. What not every rank runs must lie inside one unit, which every rank runs, or in
            none (``units``); else it is refused.
    """

    name = "fsdp"
    phase = Phase.PARTITION
    rules: ClassVar[tuple[Rule, ...]] = RULES
    provides = ("fsdp", "dp", "zero", "comm_hook", "cpu_offload")
    replaces = ("data_parallel",)

    def __init__(
        self,
        degree: int | None = None,
        *,
        zero: Literal[1, 2, 3] | None = None,
        units: Asked | None = None,
        reduce: Literal["each", "last"] | None = None,
        reshard_after_forward: bool | int | None = None,
        gather_dtype: Literal["bf16", "fp16"] | None = None,
        find_unused_parameters: bool = False,
    ) -> None:
        for what, value, choices in (
            ("reduce", reduce, ("each", "last")),
            ("gather_dtype", gather_dtype, tuple(_DTYPES)),
            ("zero", zero, (1, 2, 3)),
        ):
            if value is not None and value not in choices:
                raise PlanError(f"{what} of FSDP must be one of {', '.join(map(repr, choices))}, not {value!r}.")
        self.degree = degree
        self._zero = zero
        self._units = units
        self._reduce = reduce
        self._reshard_after_forward = reshard_after_forward
        self._gather_dtype = gather_dtype
        self._find_unused = find_unused_parameters
        own = _own_rules(reduce, reshard_after_forward, gather_dtype, mixed=find_unused_parameters)
        self.rules = (*RULES, *own)  # type: ignore[misc]  # what this one was given is refused before launch, too
        self._sharding: Sharding | None = None
        self._described: str | None = None
        self._apart = False

    @property
    def fields(self) -> Mapping[str, Any]:
        """The degree and the level, where they were said."""
        said = {"fsdp": self.degree, "zero": self._zero}
        return {name: value for name, value in said.items() if value is not None}

    def transform(self, module: nn.Module, engine: Engine) -> nn.Module:
        """Shards the model; every rank starts from the first rank's parameters."""
        plan, mesh = engine.plan, engine.mesh
        if plan.fsdp == 1 and not plan.offloads_parameters:
            return module
        self._decide(engine)
        dims = ("dp", "fsdp") if plan.dp > 1 else ("fsdp",)
        units = find_units(engine.module, self._units)
        rest = rest_of(engine.module, units)
        layout = Layout(
            mesh.device_mesh(*dims),
            tuple(unit.name for unit in units),
            _offloaded(engine, [*units, rest]),
            _DTYPES.get(self._gather_dtype or ""),
            _reduced_in(plan, self._gather_dtype),
        )
        group = mesh.group(*DATA_DEGREES) if mesh.data_ranks > 1 else None
        if group is not None and not is_sharded(engine.module):
            require_same_births(engine.module, mesh)
            same_everywhere(engine.module, group)
        needs = self._needs(plan, units, rest)
        self.bytes_held, self.bytes_between = needs.held, needs.between
        self._described = self._in_words(plan, layout, needs, engine.module)
        self._sharding = shard(engine.module, units, layout)
        self._sharding.set_reshard_after_forward(self._reshards)
        self._usage = Usage(self._sharding, mesh, mixed=self._find_unused)
        self._entrance = Entrance(module, self._sharding, group)
        return self._entrance

    def _decide(self, engine: Engine) -> None:
        """Settles what was left open, now that the whole plan is known."""
        plan = engine.plan
        self._level = self._zero or plan.zero
        default = "last" if self._level == 1 and plan.comm_hook is None else "each"
        self._when = self._reduce or default
        shards = self._reshard_after_forward
        self._reshards = self._level == 3 if shards is None else shards
        runner = next((plugin for plugin in engine.plugins if plugin.overrides("run_micro_batches")), None)
        if runner is not None and not getattr(runner, "reshard", False):
            self._reshards = False  # a unit is used again before long: for another micro-batch

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, engine: Engine) -> torch.optim.Optimizer:
        """Gives an optimizer that treats elements alike plain shards; another one keeps tensors that know the whole."""
        if self._sharding is None:
            return optimizer
        self._sharding.prepare()
        if is_elementwise(optimizer):
            engine.update.hold(_shard_of)
            return optimizer
        name = type(optimizer).__name__
        if name in _KNOWS_NO_SHARDS:
            raise ModelError(
                f"{name} {_KNOWS_NO_SHARDS[name]}. Use an optimizer that treats elements one by one, such as "
                "adamw, or dp= in place of fsdp=."
            )
        return optimizer

    def micro_batch(self, index: int, count: int, part: Part, last: bool) -> AbstractContextManager[Any]:
        """Says what the backward of a micro-batch does with gradients and gathered parameters."""
        if self._sharding is None:
            return nullcontext()
        self._apart = part != "both"
        last = index == count - 1
        if part == "both":
            return self._around(self._sharding, index, last=last)
        return self._forward(self._sharding, index) if part == "forward" else self._backward(self._sharding, last=last)

    @contextmanager
    def _around(self, sharding: Sharding, index: int, *, last: bool) -> Iterator[None]:
        if index == 0:
            self._begin(sharding)
        self._entrance.forwarded = False
        sharding.before_backward(reduces=last or self._when == "each", lets_go=last or self._reshards is not False)
        with self._checked(sharding), self._usage.micro_batch():
            yield

    @contextmanager
    def _forward(self, sharding: Sharding, index: int) -> Iterator[None]:
        """A forward by itself: others may follow before the first backward, and what they keep must not change."""
        if index == 0:
            self._begin(sharding)
            self._entrance.forwarded = False
        with self._checked(sharding):
            yield
            self._usage.after_forward(self._entrance.begins)

    @contextmanager
    def _backward(self, sharding: Sharding, *, last: bool) -> Iterator[None]:
        """A backward by itself: of some units, if this rank has several stages; the last one reduces for all."""
        reduces, lets_go = last or self._when == "each", last or self._reshards is not False
        sharding.before_backward(reduces=reduces, lets_go=lets_go, is_last=last)
        with self._checked(sharding):
            yield
            sharding.finish_backward()  # the second half of one in two begins and ends inside of modules
            self._usage.after_backward()

    def _begin(self, sharding: Sharding) -> None:
        sharding.begin_step()
        self._usage.begin()

    @contextmanager
    def _checked(self, sharding: Sharding) -> Iterator[None]:
        """Finds changes that sharding would lose; where anything is raised, nothing is left of the step."""
        try:
            yield
            sharding.originals.require_unused()
            sharding.changes.require_none()
        except BaseException:
            sharding.reset()
            raise
        finally:
            self._entrance.begins = []

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss as it is; what ran and what it depends on is compared over the ranks in the first step."""
        return loss if self._sharding is None or self._apart else self._usage.before_backward(loss)

    def reduce_gradients(self, engine: Engine) -> None:
        """Backward has reduced them: the ranks compare whether all of them reduced the same."""
        if self._sharding is not None:
            self._sharding.end_step()
            self._usage.end()

    def partitioned_over(self, name: str, parameter: nn.Parameter) -> Sequence[str] | None:
        """Every sharded parameter is, also over one rank: its module runs only as the engine calls it."""
        return ("fsdp",) if is_spread(parameter) and self._sharding is not None else ()

    def step(self, engine: Engine, proceed: Callable[[], bool]) -> bool:
        """Lets go of what a forward without a backward has left gathered."""
        if self._sharding is not None:
            self._sharding.let_go()
        return proceed()

    def load_state_dict(self, state: State, engine: Engine) -> State:
        """Lets go of what is gathered: the shards are about to change."""
        if self._sharding is not None:
            self._sharding.let_go()
        return state

    def describe(self) -> str:
        """Returns one line for the printed plan: what is sharded, and the bytes of each kind on a rank."""
        return self._described or f"fully sharded over {self.degree or 'the'} ranks"

    def _needs(self, plan: Plan, units: Sequence[Unit], rest: Unit) -> Gathered:
        return gathered_bytes(
            units,
            rest,
            shards=plan.fsdp,
            lets_go=self._reshards,
            reduced_each=self._when == "each",
            gathered_in=_DTYPES.get(self._gather_dtype or ""),
        )

    def _in_words(self, plan: Plan, layout: Layout, needs: Gathered, model: nn.Module) -> str:
        whole = sum(bytes_gathered(parameter) for parameter in model.parameters())
        trained = sum(bytes_gathered(parameter) for parameter in model.parameters() if parameter.requires_grad)
        replicas = f" × {plan.dp} replicas" if plan.dp > 1 else ""
        over = f"fully sharded over {plan.fsdp} ranks{replicas}, zero {self._level}" if plan.fsdp > 1 else "gathered"
        host = f", {len(layout.offloaded)} parts of them on the host" if layout.offloaded else ""
        gradients = {"each": trained // plan.fsdp, "last": trained}
        other = "each" if self._when == "last" else "last"
        return (
            f"{over} in {len(layout.units)} units{host}; of a rank: parameters {as_text(whole / plan.fsdp)}, gathered "
            f"{as_text(needs.parameters)} at most; gradients from one micro-batch to the next "
            f"{as_text(gradients[self._when])} (reduce={self._when!r}; {as_text(gradients[other])} with {other!r}); "
            f"AdamW's state {as_text(_OPTIMIZER_COPIES * trained / plan.fsdp)}"
        )


_KNOWS_NO_SHARDS = {
    "Adafactor": "divides by norms of whole rows and columns, which torch cannot do for sharded parameters",
    "Muon": "multiplies whole matrices in bf16, which torch rounds differently, by percents of a step, if they are "
    "sharded",
}


def _shard_of(held: Held) -> torch.Tensor:
    if not is_spread(held.tensor):
        return held.tensor
    return nn.Parameter(local(held.tensor).detach(), requires_grad=held.tensor.requires_grad)


def _offloaded(engine: Engine, units: Sequence[Unit]) -> frozenset[str]:
    if not engine.plan.offloads_parameters:
        return frozenset()
    return frozenset(chosen_units(units, engine.plan.cpu_offload, tensors_of_the_whole(engine.module)))


def _reduced_in(plan: Plan, gather_dtype: str | None) -> torch.dtype | None:
    if plan.comm_hook is not None and plan.data_ranks > 1:
        return _DTYPES[plan.comm_hook]
    return torch.float32 if gather_dtype is not None else None


def from_plan(plan: Plan, options: Mapping[str, Any]) -> FSDP | None:
    """Returns the plugin that a plan asks for, or None."""
    return FSDP(plan.fsdp, **options) if plan.fsdp > 1 or plan.offloads_parameters else None
