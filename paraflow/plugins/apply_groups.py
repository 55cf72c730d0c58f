"""The optimizer applied to some of the parameters at a time, or to each as soon as backward has its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim import optimizer as torch_optimizer

from paraflow.errors import PlanError
from paraflow.optim.rehearsal import steps_by_parameter
from paraflow.parts import local
from paraflow.plan import Plan
from paraflow.plugins.base import Part, Phase, Plugin
from paraflow.rules import Facts, Rule

if TYPE_CHECKING:
    from paraflow.engine import Engine
    from paraflow.optim.update import Held, Update

_GROUPS = "Write apply_groups=8, which applies the optimizer in groups after backward"


def _in_backward(broken: Callable[[Facts], bool]) -> Callable[[Facts], bool]:
    return lambda f: f.plan.apply_groups == "backward" and broken(f)


class ApplyGroups(Plugin):
    """Applies the optimizer in groups, so that what it allocates for a step is never more than a group's.

    Results are those of one step over everything, to the bit; so are hooks of the optimizer, schedules and checkpoints.
    Clipping is by the norm over all parameters still. An optimizer that looks at all parameters at once, as L-BFGS, or
    one with a bound on their common gradient norm, is refused; what torch does not bring is tried out on small tensors.

    ``"backward"`` is the extreme: each parameter is updated as soon as it has its gradient, which is freed at once, so
    that there are never more gradients than a layer's. After backward nothing is left that reads gradients:
    ``engine.gradients()`` is empty, and callbacks that look at them find none; `NaNGuard` refuses. A step that raises
    in backward leaves some parameters updated.

    Args:
        groups: The number of groups, or ``"backward"``.
    """

    name = "apply_groups"
    phase = Phase.OPTIMIZE
    rules = (
        Rule(
            "backward-apply-accumulate",
            _in_backward(lambda f: f.plan.accumulate > 1),
            "apply_groups='backward' updates a parameter with the gradient of one micro-batch, and "
            "accumulate={f.plan.accumulate} asks for the sum of several.",
            f"{_GROUPS}, or accumulate=1.",
        ),
        Rule(
            "backward-apply-clip",
            _in_backward(lambda f: f.plan.clip_norm is not None),
            "apply_groups='backward' updates parameters before all gradients are there, and clip_norm needs the norm "
            "of all of them.",
            f"{_GROUPS} and clips by the global norm, or leave clip_norm out.",
        ),
        Rule(
            "backward-apply-fp16",
            _in_backward(lambda f: f.plan.precision == "fp16"),
            "apply_groups='backward' updates parameters before it is known whether all gradients are finite, which "
            "precision='fp16' decides a step by.",
            f"{_GROUPS}, or precision='bf16', which needs no loss scale.",
        ),
        Rule(
            "backward-apply-replicas",
            _in_backward(lambda f: f.plan.dp > 1 and f.plan.fsdp == 1),
            "apply_groups='backward' updates a parameter before its gradient is averaged over the dp={f.plan.dp} "
            "replicas.",
            f"{_GROUPS}, or fsdp={{f.plan.dp}} instead of dp, whose gradients are averaged in backward.",
        ),
        Rule(
            "backward-apply-runner",
            _in_backward(lambda f: bool(f.runners)),
            "apply_groups='backward' needs one backward a step, and the plugins {f.runners} run micro-batches in an "
            "order of their own.",
            f"{_GROUPS}.",
        ),
    )

    def __init__(self, groups: int | Literal["backward"]) -> None:
        Plan(apply_groups=groups)  # says what it may be
        self.groups = groups
        self._update: Update | None = None

    @property
    def fields(self) -> Mapping[str, Any]:
        """The number of groups."""
        return {"apply_groups": self.groups}

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, engine: Engine) -> torch.optim.Optimizer:
        """Divides what the optimizer holds.

        Raises:
            PlanError: The optimizer looks at all parameters at once.
        """
        if not steps_by_parameter(optimizer):
            raise PlanError(
                f"[apply-groups-optimizer] {type(optimizer).__name__} cannot be applied to some parameters at a time: "
                "what it does to one depends on the others, or on how often it is called, or one of its methods was "
                "replaced on it. Leave apply_groups out, or use one of torch's optimizers as it is, such as adamw.",
                rule="apply-groups-optimizer",
            )
        if self.groups == "backward":
            self._update = engine.update
        else:
            engine.update.divide(self.groups)
        return optimizer

    def micro_batch(self, index: int, count: int, part: Part, last: bool) -> AbstractContextManager[Any]:
        """Has backward update parameters, where that was asked for."""
        return nullcontext() if self._update is None else _applying(self._update, count)

    def overrides(self, method: str) -> bool:
        """Whether there is something to do around a micro-batch: only in backward."""
        return super().overrides(method) and (method != "micro_batch" or self.groups == "backward")

    def describe(self) -> str:
        """Returns one line for the printed plan."""
        if self.groups == "backward":
            return "each parameter updated in backward, as soon as it has its gradient, which is then freed"
        return f"optimizer applied in {self.groups} groups by bytes, one after another"


@contextmanager
def _applying(update: Update, count: int) -> Iterator[None]:
    _require_one_look(update.optimizer, count)
    update.forget()
    handles = [
        held.parameter.register_post_accumulate_grad_hook(partial(_apply, update, held))  # type: ignore[no-untyped-call]
        for held in update.held
        if held.parameter.requires_grad
    ]
    try:
        yield
    finally:  # another run may train these parameters otherwise
        for handle in handles:
            handle.remove()


def _apply(update: Update, held: Held, parameter: torch.Tensor) -> None:
    gradient = local(parameter.grad) if parameter.grad is not None else parameter
    # On the host the engine looks for the NaN of a mean over nothing; what is left here is applied after it has looked.
    if gradient.device.type == "cpu" and gradient.layout is torch.strided and bool(gradient.isnan().any()):
        return
    update.apply_now(held)


def _require_one_look(optimizer: torch.optim.Optimizer, count: int) -> None:
    """Refuses what is known only when a step begins."""
    if count > 1:
        raise PlanError(
            f"[backward-apply-accumulate] apply_groups='backward' updates a parameter with the gradient of one "
            f"micro-batch, and batches are divided into {count}, since they are not known to fit in memory whole. "
            f"{_GROUPS}, or a smaller batch_size with accumulate=1.",
            rule="backward-apply-accumulate",
        )
    if optimizer._optimizer_step_pre_hooks or torch_optimizer._global_optimizer_pre_hooks:
        raise PlanError(
            f"[backward-apply-hooks] {type(optimizer).__name__} has a hook that is called before its step, and with "
            f"apply_groups='backward' parameters are updated before there is a step. {_GROUPS}.",
            rule="backward-apply-hooks",
        )


def from_plan(plan: Plan, options: Mapping[str, Any]) -> ApplyGroups | None:
    """Returns the plugin that a plan asks for, or None."""
    return ApplyGroups(plan.apply_groups, **options) if plan.apply_groups != 1 else None
