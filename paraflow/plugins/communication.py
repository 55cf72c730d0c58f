"""Half-precision gradient communication: on the hooks of torch's DistributedDataParallel, or after backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from paraflow.errors import PlanError
from paraflow.plan import Plan
from paraflow.plugins.base import Phase, Plugin
from paraflow.plugins.data_parallel import DataParallel

if TYPE_CHECKING:
    from paraflow.engine import Engine


class HalfCommunication(Plugin):
    """Sends gradients in 16 bits: rounded, divided by the number of ranks, summed, and widened again.

    Where DistributedDataParallel cannot average them during backward (under a pipeline, or of layers that are split),
    they are averaged after it, in 16 bits as well. Only the micro-batch that synchronises communicates, so accumulation
    itself stays in fp32. On one rank there is nothing to send, and nothing is done.

    Args:
        dtype: ``"bf16"`` (fp32's range, 8 bits of precision) or ``"fp16"`` (11 bits, range to 65,504).
    """

    name = "communication"
    phase = Phase.OPTIMIZE

    def __init__(self, dtype: str = "bf16") -> None:
        if dtype not in ("bf16", "fp16"):
            raise PlanError(f"HalfCommunication takes 'bf16' or 'fp16', not {dtype!r}.")
        self.dtype = dtype

    @property
    def fields(self) -> Mapping[str, Any]:
        """The hook."""
        return {"comm_hook": self.dtype}

    def transform(self, module: nn.Module, engine: Engine) -> nn.Module:
        """Registers the hook on the replica that data parallelism made; what others average is averaged so already."""
        others = [plugin for plugin in engine.plugins if plugin is not self]
        if engine.mesh.degree("dp") == 1 or any("comm_hook" in plugin.provides for plugin in others):
            return module
        from torch.nn.parallel import DistributedDataParallel

        replica = next((layer for layer in module.modules() if isinstance(layer, DistributedDataParallel)), None)
        if replica is None and any(isinstance(plugin, DataParallel) for plugin in others):
            return module
        if replica is None:
            raise PlanError(
                f"[comm-hook-needs-ddp] comm_hook={self.dtype!r} compresses what DistributedDataParallel sends, and "
                "the plan's data parallelism is another plugin's. Leave comm_hook out.",
                rule="comm-hook-needs-ddp",
            )
        replica.register_comm_hook(engine.mesh.group("dp"), _compression(self.dtype))
        return module

    def describe(self) -> str:
        """Returns one line for the printed plan."""
        return f"gradients communicated in {self.dtype}"


def _compression(dtype: str) -> Callable[[Any, Any], Any]:
    """Gives torch's hook another name: by its own, torch refuses bf16 on gloo, which can reduce it."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    compress = default_hooks.fp16_compress_hook if dtype == "fp16" else default_hooks.bf16_compress_hook

    def half_communication(group: Any, bucket: Any) -> Any:
        return compress(group, bucket)

    # torch compares annotations with types, and here they are strings.
    half_communication.__annotations__ = {}
    return half_communication


def from_plan(plan: Plan, options: Mapping[str, Any]) -> HalfCommunication | None:
    """Returns the plugin that a plan asks for, or None."""
    return HalfCommunication(plan.comm_hook, **options) if plan.comm_hook is not None else None
