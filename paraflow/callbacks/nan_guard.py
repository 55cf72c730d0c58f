"""Stops a run before a gradient that is not finite reaches the weights, and says where it came from."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, Literal

import torch

from paraflow.callbacks.base import Callback
from paraflow.callbacks.nonfinite import in_backward, in_forward, in_parameters
from paraflow.errors import ParaflowError, PlanError
from paraflow.interval import Interval

if TYPE_CHECKING:
    from paraflow.engine import Engine
    from paraflow.trainer import Trainer

_NEVER = "1000000000ep"


class NaNGuard(Callback):
    """Looks at the global gradient norm before the optimizer steps; where it is not finite, says what began it.

    The weights are then those before the step. The forward of the step is run again on every rank, with other random
    numbers where the model draws them, and all ranks say alike: the step, the ranks that began it, and of each the
    first of: parameters that are not finite already; the fields of its data; the first modules whose output is not
    finite where their inputs are; its loss; the parameters whose gradients are not, in the order of backward.

    A check waits once for the device, and computes the norm (a collective where parameters are spread over ranks)
    unless the plan clips, and has measured it. A step that fp16 leaves out because its gradients overflowed is not
    checked: that is how the loss scale finds its height. A ``val_loss`` that is not finite is warned of.

    Args:
        every: Every how many steps the norm is looked at. Between checks a gradient that is not finite reaches the
            weights, and the next check names the parameters.
        action: ``"raise"`` raises `ParaflowError` on every rank; ``"stop"`` warns and ends the run with this step,
            whose gradients are dropped, so that the weights stay as they are.

    Raises:
        ValueError: An argument is not of its kind.
        PlanError: The plan updates parameters in backward (``apply_groups="backward"``).
    """

    def __init__(self, every: int | str = 1, action: Literal["raise", "stop"] = "raise") -> None:
        self._interval = Interval.parse(every)
        if self._interval.unit != "st":
            raise ValueError(f"NaNGuard looks every so many steps: write 10 or '10st', not {every!r}.")
        if action not in ("raise", "stop"):
            raise ValueError(f"action must be 'raise' or 'stop', not {action!r}.")
        self.action = action
        # The event of a step's end is where ranks agree to stop; it costs an exchange, and raising needs none.
        self.every = every if action == "stop" else _NEVER

    def on_train_begin(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Refuses a plan under which there is nothing left to look at before the optimizer steps.

        Raises:
            PlanError: Parameters are updated in backward.
        """
        if trainer.engine.plan.apply_groups == "backward":
            raise PlanError(
                "[backward-apply-nan-guard] NaNGuard looks at all gradients before the optimizer steps, and "
                "apply_groups='backward' has updated parameters with them by then. Write apply_groups=8, or leave "
                "NaNGuard out.",
                rule="backward-apply-nan-guard",
            )

    def on_before_optimizer_step(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Looks at the norm."""
        if (trainer.step + 1) % self._interval.amount:
            return
        engine = trainer.engine
        norm = engine.gradient_norm() if engine.last_norm is None else engine.last_norm
        if bool(torch.isfinite(norm)):
            return
        sentence = _sentence(trainer, norm.item())
        if self.action == "raise":
            raise ParaflowError(sentence)
        if trainer.is_main:
            warnings.warn(f"{sentence} The run ends here.", stacklevel=2)
        for parameter in engine.parameters:
            parameter.grad = None  # an optimizer passes over these
        trainer.stop()

    def on_step_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """After it the ranks agree to stop, if one has asked for it."""

    def on_validation_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Warns of a validation loss that is not finite."""
        loss = float(logs.get("val_loss", 0.0))
        if trainer.is_main and not math.isfinite(loss):
            warnings.warn(
                f"The validation loss after step {trainer.step} is {loss}, and the gradients that NaNGuard looked at "
                "were finite: look at the validation data, and at what the model does in evaluation only.",
                stacklevel=2,
            )


def _sentence(trainer: Trainer, norm: float) -> str:
    """What every rank says of a step whose gradient is not finite: a collective."""
    found = _findings(trainer)
    where = found or "Run again, forward and backward are finite on every rank: a sum overflowed, or it was chance"
    return (
        f"The gradient of step {trainer.step + 1} is not finite (its norm is {norm}); the optimizer has not stepped. "
        f"{where}. {_advice(trainer.engine, found)}"
    )


def _findings(trainer: Trainer) -> str:
    """Looks for one kind of thing after another, each on all ranks together, since looking may communicate."""
    for look in (in_parameters, in_forward, in_backward):
        try:
            mine = look(trainer.engine)
        except Exception as error:  # the other ranks wait for an answer
            mine = f"looking for it raised {type(error).__name__}: {error}"
        said = trainer.mesh.gather_texts(mine)
        ranks: dict[str, list[int]] = {}
        for rank, text in enumerate(said):
            if text:
                ranks.setdefault(text, []).append(rank)
        if ranks:
            return "; ".join(f"{_ranks(who, trainer.mesh.world_size)}: {text}" for text, who in ranks.items())
    return ""


def _ranks(who: list[int], world_size: int) -> str:
    if len(who) == world_size > 1:
        return "It began on every rank"
    return f"It began on rank {' and '.join(map(str, who))}"


def _advice(engine: Engine, found: str) -> str:
    if "its data is not finite" in found:
        return "Look at these samples, and clean or drop them."
    if "parameters that are not finite already" in found:
        return "Go on from an earlier checkpoint, and look at every step: NaNGuard(every=1)."
    clip = "" if engine.plan.clip_norm is not None else ", Trainer(clip_norm=1.0)"
    precision = "" if engine.plan.precision == "fp32" else ", precision='fp32'"
    return (
        f"Try a lower learning rate or a warmup{clip}{precision}, or guard what divides, takes a logarithm or a root."
    )
