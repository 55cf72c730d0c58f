"""Data parallelism on torch's DistributedDataParallel: every rank holds the model and sees other samples."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paraflow.collectives import average, broadcast
from paraflow.errors import ModelError
from paraflow.parts import is_spread, local
from paraflow.plan import Plan
from paraflow.plugins.base import Part, Phase, Plugin
from paraflow.plugins.precision import DTYPES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.nn.parallel import DistributedDataParallel

    from paraflow.engine import Engine


class DataParallel(Plugin):
    """Replicas of the model that average their gradients, in buckets, while backward goes on.

    Where another plugin runs the micro-batches in an order of its own, forwards and backwards no longer alternate,
    which DistributedDataParallel needs; gradients are then averaged once, after the last backward. So are those of
    parameters of which a rank holds a part, which it does not take. What replicas hold different parts of is not theirs
    to average.

    Args:
        degree: The number of replicas; None fills the world.
        find_unused_parameters: Whether the model leaves out parameters in some steps. It costs a walk of the graph.
        static_graph: Whether every step uses the same parameters in the same way.
        bucket_cap_mb: The size of a bucket in MiB.
        broadcast_buffers: Whether rank 0's buffers are given to all before each forward; None does so where the model
            has normalisation layers that keep running statistics.
    """

    name = "data_parallel"
    phase = Phase.DISTRIBUTE
    provides = ("dp",)

    def __init__(
        self,
        degree: int | None = None,
        *,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        bucket_cap_mb: float = 25,
        broadcast_buffers: bool | None = None,
    ) -> None:
        self.degree = degree
        self._find_unused = find_unused_parameters
        self._static_graph = static_graph
        self._bucket_cap_mb = bucket_cap_mb
        self._broadcast_buffers = broadcast_buffers
        self._replica: DistributedDataParallel | None = None
        self._after_backward: ProcessGroup | None = None
        self._later: list[nn.Parameter] = []
        self._checked = False
        self._forwarded = False

    @property
    def fields(self) -> Mapping[str, Any]:
        """The degree, where it was said."""
        return {} if self.degree is None else {"dp": self.degree}

    def transform(self, module: nn.Module, engine: Engine) -> nn.Module:
        """Wraps the step in DistributedDataParallel; every replica starts from its first rank's parameters."""
        if engine.mesh.degree("dp") == 1 or not any(p.requires_grad for p in module.parameters()):
            return module
        group = engine.mesh.group("dp")
        replicated = [p for p in module.parameters() if p.requires_grad and not _is_shared_out(p)]
        parts = [p for p in module.parameters() if is_spread(p) and not _is_shared_out(p)]
        whole = [p for p in replicated if not is_spread(p)]
        if not engine.runs_in_turn or not whole:
            self._after_backward, self._later = group, replicated
            given = [local(p) for p in module.parameters() if not _is_shared_out(p)]
            broadcast([*given, *module.buffers()], group, self._bucket_bytes)
            return module
        if parts:
            self._after_backward, self._later = group, [p for p in parts if p.requires_grad]
            broadcast([local(p) for p in parts], group, self._bucket_bytes)
        self._replica = self._replicate(module, group)
        if not self._find_unused and not self._static_graph and not _has_hooks(module):
            self._rehearse(self._replica)
        return self._replica

    def _replicate(self, module: nn.Module, group: ProcessGroup) -> DistributedDataParallel:
        from torch.nn.parallel import DistributedDataParallel

        wanted = _keeps_statistics(module) if self._broadcast_buffers is None else self._broadcast_buffers
        rehearsable = _Rehearsable(module)
        spread = [name for name, p in rehearsable.named_parameters(remove_duplicate=False) if is_spread(p)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(rehearsable, spread)  # type: ignore[no-untyped-call]
        replica = DistributedDataParallel(
            rehearsable,
            process_group=group,
            **_buffers_option(DistributedDataParallel, wanted),
            bucket_cap_mb=self._bucket_cap_mb,
            find_unused_parameters=self._find_unused,
            static_graph=self._static_graph,
            gradient_as_bucket_view=True,
        )
        replica.register_forward_pre_hook(self._before_forward)
        return replica

    def _before_forward(self, replica: nn.Module, *_: Any) -> None:
        """A forward that is run again for one micro-batch must not give out rank 0's buffers again."""
        if torch.is_grad_enabled() and self._forwarded:
            replica.require_forward_param_sync = False  # type: ignore[assignment]
        self._forwarded = torch.is_grad_enabled()

    def _rehearse(self, replica: DistributedDataParallel) -> None:
        """Has the buckets made final before the first step.

        After its first backward DistributedDataParallel puts gradients in other buckets, and from three ranks on they
        are then summed in another order: a run that is resumed would differ in the last bits from one that went on.
        """
        replica(None, None).backward()
        for parameter in replica.parameters():
            parameter.grad = None

    @property
    def _bucket_bytes(self) -> int:
        return int(self._bucket_cap_mb * 2**20)

    def micro_batch(self, index: int, count: int, part: Part = "both") -> AbstractContextManager[Any]:
        """Gradients of all but a step's last micro-batch stay on their rank; forward has to be inside as well."""
        self._forwarded = False
        if self._replica is None or index == count - 1:
            return nullcontext()
        context: AbstractContextManager[Any] = self._replica.no_sync()
        return context

    def reduce_gradients(self, engine: Engine) -> None:
        """Backward has averaged them already, and the first step checks that it could; or they are averaged here."""
        self._require_all_used(engine)
        if self._after_backward is None:
            return
        for parameter in self._later:
            if parameter.grad is None:  # on another rank it may have had a part
                parameter.grad = torch.zeros_like(parameter)
        gradients = [local(p.grad) for p in self._later if p.grad is not None]
        average(gradients, self._after_backward, self._bucket_bytes, DTYPES.get(engine.plan.comm_hook or ""))

    def _require_all_used(self, engine: Engine) -> None:
        if self._checked or self._replica is None:
            return
        self._checked = True
        unused = [name for name, p in engine.module.named_parameters() if p.requires_grad and p.grad is None]
        if unused and not self._find_unused:
            raise ModelError(
                f"These parameters had no part in the loss of the first step: {', '.join(unused[:5])}"
                f"{' and more' if len(unused) > 5 else ''}. Replicas cannot agree on their gradients. Freeze them with "
                "requires_grad_(False), or write plugins=[pf.plugins.DataParallel(find_unused_parameters=True)]."
            )

    def describe(self) -> str:
        """Returns one line for the printed plan."""
        return f"data parallel over {self.degree or 'all'} ranks: gradients averaged in buckets during backward"


class _Rehearsable(nn.Module):
    """A task's steps, and a step without a name in which gradients come in the reverse order of the parameters."""

    def __init__(self, steps: nn.Module) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, step: str | None, batch: Any) -> Any:
        if step is not None:
            return self.steps(step, batch)
        # Autograd runs first what was recorded last; one element is enough for a gradient.
        firsts = [p.flatten()[:1].sum() for p in self.parameters() if p.requires_grad and not is_spread(p)]
        return torch.stack([first.float() for first in firsts]).sum()


def _is_shared_out(parameter: nn.Parameter) -> bool:
    """Whether replicas hold different parts of a parameter, so that none averages it."""
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and "dp" in (mesh.mesh_dim_names or ())


def _has_hooks(module: nn.Module) -> bool:
    """Whether the user has something called with gradients (an optimizer in backward): a rehearsal would be real."""
    return any(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) for p in module.parameters())


def _buffers_option(replica: type, wanted: bool) -> dict[str, Any]:
    """Torch 2.13 has a new name for the argument, and warns of the old one."""
    new = "forward_sync_buffers" in inspect.signature(replica).parameters
    return {"forward_sync_buffers" if new else "broadcast_buffers": wanted}


def _keeps_statistics(module: nn.Module) -> bool:
    """Whether a layer updates buffers in forward: they would differ from rank to rank."""
    return any(getattr(layer, "track_running_stats", False) for layer in module.modules())


def from_plan(plan: Plan, options: Mapping[str, Any]) -> DataParallel | None:
    """Returns the plugin that a plan asks for, or None."""
    return DataParallel(plan.dp, **options) if plan.dp > 1 else None
