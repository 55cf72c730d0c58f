"""Half precision: matrix products in bf16 or fp16, parameters, gradients and optimizer state in fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paraflow.errors import PlanError
from paraflow.plan import Plan
from paraflow.plugins.base import Phase, Plugin, State

if TYPE_CHECKING:
    from paraflow.engine import Engine

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision(Plugin):
    """Runs forward under torch's autocast; for fp16 also scales the loss so that small gradients do not vanish.

    Backward runs outside autocast, as torch advises. With fp16 a step whose gradients are not finite is left out, on
    every rank alike, and the learning-rate schedule does not advance.

    Args:
        dtype: ``"bf16"`` or ``"fp16"``.
        initial_scale: The first loss scale for fp16.
        growth_interval: Finite steps after which the scale doubles.
    """

    name = "precision"
    phase = Phase.PREPARE

    def __init__(self, dtype: str = "bf16", *, initial_scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        if dtype not in DTYPES:
            raise PlanError(f"Precision takes 'bf16' or 'fp16', not {dtype!r}; fp32 needs no plugin.")
        self.dtype = dtype
        self.may_overflow = dtype == "fp16"
        self._initial_scale = initial_scale
        self._growth_interval = growth_interval
        self._scaler: torch.amp.GradScaler | None = None

    @property
    def fields(self) -> Mapping[str, Any]:
        """The precision."""
        return {"precision": self.dtype}

    def transform(self, module: nn.Module, engine: Engine) -> nn.Module:
        """Wraps the step in autocast."""
        device = engine.mesh.device.type
        if self.dtype == "fp16":
            self._scaler = _AgreeingScaler(
                engine, device, init_scale=self._initial_scale, growth_interval=self._growth_interval
            )
            # Torch makes the scale when a loss is first scaled, and a rank may have none.
            self._scaler.scale(torch.zeros((), device=engine.mesh.device))
        return _Autocast(module, device, DTYPES[self.dtype])

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiplies the loss by the scale, where there is one."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def step(self, engine: Engine, proceed: Callable[[], bool]) -> bool:
        """Takes the scale out of the gradients, then lets the rest go on if they are finite."""
        if self._scaler is None:
            return proceed()
        gate = _Gate(engine, proceed)
        self._scaler.unscale_(gate)
        self._scaler.step(gate)
        self._scaler.update()
        return gate.stepped

    def state_dict(self, state: State, engine: Engine) -> State:
        """Adds the scale."""
        if self._scaler is not None:
            state["plugins"][self.name] = self._scaler.state_dict()
        return state

    def load_state_dict(self, state: State, engine: Engine) -> State:
        """Takes up the scale, where the state has one."""
        saved = state["plugins"].get(self.name)
        if self._scaler is not None and saved:
            self._scaler.load_state_dict(saved)
        return state

    def describe(self) -> str:
        """Returns one line for the printed plan."""
        scaled = " with dynamic loss scaling" if self.dtype == "fp16" else ""
        return f"{self.dtype} forward under autocast{scaled}; parameters and optimizer in fp32"


class _Autocast(nn.Module):
    def __init__(self, module: nn.Module, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.module = module
        self._device = device
        self._dtype = dtype

    def forward(self, step: str, batch: Any) -> Any:
        with torch.autocast(self._device, dtype=self._dtype):
            return self.module(step, batch)


class _Gate(torch.optim.Optimizer):
    """What the scaler sees as the optimizer: its step is the rest of the plugins and the real optimizer."""

    def __init__(self, engine: Engine, proceed: Callable[[], bool]) -> None:
        self.param_groups = engine.optimizer.param_groups
        self.stepped = False
        self._proceed = proceed

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.stepped = self._proceed()


class _AgreeingScaler(torch.amp.GradScaler):
    """A scaler of the engine's gradients, under which ranks that hold other parts of the model agree.

    Torch's own looks at the optimizer's parameters, whose gradients may be spread over several meshes, or not be there
    yet (`paraflow.optim.Update`).
    """

    def __init__(self, engine: Engine, device: str, **options: Any) -> None:
        super().__init__(device, **options)
        self._engine = engine

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for gradient in self._engine.gradients():
            part = gradient._values() if gradient.is_sparse else gradient
            alike.setdefault((part.device, part.dtype), []).append(part)
        # A rank without gradients has a say too.
        devices = {self._engine.mesh.device, *(device for device, _ in alike)}
        found = {device: found_inf.to(device, copy=True) for device in devices}
        for (device, _), parts in alike.items():
            torch._amp_foreach_non_finite_check_and_unscale_(parts, found[device], inv_scale.to(device))
        return found

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        dims = self._engine.partition_dims
        if not dims:
            return
        for found in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            self._engine.mesh.all_reduce(found, dims, "max")


def from_plan(plan: Plan, options: Mapping[str, Any]) -> Precision | None:
    """Returns the plugin that a plan asks for, or None."""
    return Precision(plan.precision, **options) if plan.precision != "fp32" else None
