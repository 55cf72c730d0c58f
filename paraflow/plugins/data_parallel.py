"""Data parallelism on torch's DistributedDataParallel: every rank holds the model and sees other samples."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paraflow.collectives import OverlappedAverage, average, broadcast
from paraflow.collectives.overlapped import marks_of_use, take_from_others
from paraflow.errors import ModelError
from paraflow.parts import is_spread, local
from paraflow.plan import Plan
from paraflow.plugins.base import Part, Phase, Plugin
from paraflow.plugins.precision import DTYPES
from paraflow.rules import Rule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.nn.parallel import DistributedDataParallel

    from paraflow.engine import Engine


_STATIC_GRAPH_RULES = (
    Rule(
        "data-parallel-static-graph",
        lambda f: bool(f.runners),
        "static_graph=True is for DistributedDataParallel, and {f.runners} runs micro-batches in an order of its own, "
        "in which gradients are averaged without it.",
        "Leave static_graph out.",
    ),
)


class DataParallel(Plugin):
    """Replicas of the model that average their gradients, in buckets, while backward goes on.

    Where another plugin runs the micro-batches in an order of its own, forwards and backwards no longer alternate,
    which DistributedDataParallel needs; gradients are then averaged by `OverlappedAverage`, in each layer's last
    backward. So are those of parameters of which a rank holds a part, which it does not take. What is not whole after
    backward is averaged once it is. What replicas hold different parts of is not theirs to average. Buffers are given
    to all replicas before the first forward of a step there, and before one without gradients.

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
        self._ours: list[nn.Parameter] = []
        self._own_group: ProcessGroup | None = None
        self._engine: Engine | None = None
        self._averaging: OverlappedAverage | None = None
        self._completed: list[nn.Parameter] = []
        self._checked = False
        self._forwarded = False
        self._buffers: SharedBuffers | None = None
        self.rules = _STATIC_GRAPH_RULES if static_graph else ()  # type: ignore[misc]  # what this one was given

    @property
    def fields(self) -> Mapping[str, Any]:
        """The degree, where it was said."""
        return {} if self.degree is None else {"dp": self.degree}

    def transform(self, module: nn.Module, engine: Engine) -> nn.Module:
        """Wraps the step in DistributedDataParallel; every replica starts from its first rank's parameters."""
        if engine.mesh.degree("dp") == 1:
            return module
        group = engine.mesh.group("dp")
        parts = [p for p in module.parameters() if is_spread(p) and not _is_shared_out(p)]
        if parts or not engine.runs_in_turn:  # alike on all ranks of the world, which make the group
            self._own_group = engine.mesh.group_of_places("dp", range(engine.mesh.degree("dp")))
        replicated = [p for p in module.parameters() if p.requires_grad and not _is_shared_out(p)]
        whole = [p for p in replicated if not is_spread(p)]
        if (
            not engine.runs_in_turn or not whole
        ):  # where nothing is trained (a frozen stage), values are made alike, too
            self._engine, self._ours = engine, replicated
            given = [local(p) for p in module.parameters() if not _is_shared_out(p)]
            broadcast([*given, *module.buffers()], group, self._bucket_bytes)
            if self._shares_buffers(module):
                self._buffers = SharedBuffers(module, group, self._bucket_bytes)
            return self._buffers or module
        if parts:
            self._engine, self._ours = engine, [p for p in parts if p.requires_grad]
            broadcast([local(p) for p in parts], group, self._bucket_bytes)
        self._replica = self._replicate(module, group)
        if not self._find_unused and not self._static_graph and not _has_hooks(module):
            self._rehearse(self._replica)
        return self._replica

    def _replicate(self, module: nn.Module, group: ProcessGroup) -> DistributedDataParallel:
        from torch.nn.parallel import DistributedDataParallel

        wanted = self._shares_buffers(module)
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

    def _shares_buffers(self, module: nn.Module) -> bool:
        return _keeps_statistics(module) if self._broadcast_buffers is None else self._broadcast_buffers

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

    def micro_batch(self, index: int, count: int, part: Part, last: bool) -> AbstractContextManager[Any]:
        """Gradients of all but the last micro-batch stay on their rank; where DDP averages, from forward on."""
        self._forwarded = False
        stack = ExitStack()
        if self._replica is not None and index < count - 1:
            stack.enter_context(self._replica.no_sync())
        if self._buffers is not None and index == 0 and part != "backward":
            self._buffers.begin_step()
        averaging = self._average_of_ours()
        if averaging is None:
            return stack
        if index == 0 and part != "backward":
            listens = self._engine is not None and bool(self._engine.hooks.after_backward)
            averaging.begin_step(waits=listens)  # what is on its way is not to be looked at
        if last and part != "forward":
            stack.enter_context(averaging.in_last_backward())
        return stack

    def _average_of_ours(self) -> OverlappedAverage | None:
        """What averages gradients here; made when the step begins, since plugins know by then what they complete."""
        engine, group = self._engine, self._own_group
        if engine is None or group is None or not self._ours:
            return None
        if self._averaging is None and not self._completed:
            before = engine.plugins[: engine.plugins.index(self)]
            completed = {
                parameter
                for name, parameter in engine.module.named_parameters()
                if any(plugin.completes_gradient(name, parameter) for plugin in before)
            }
            self._completed = [parameter for parameter in self._ours if parameter in completed]
            ours = [parameter for parameter in self._ours if parameter not in completed]
            dtype = DTYPES.get(engine.plan.comm_hook or "")
            self._averaging = OverlappedAverage(ours, group, self._bucket_bytes, dtype) if ours else None
        return self._averaging

    def reduce_gradients(self, engine: Engine) -> None:
        """Backward has averaged most of them already; what could not be is averaged here."""
        self._require_all_used(engine)
        averaging = self._average_of_ours()
        if averaging is not None:
            averaging.finish_step()
        if self._completed:
            self._average_completed(engine)

    def _average_completed(self, engine: Engine) -> None:
        """Averages what other plugins have completed; what no replica has used has no gradient afterwards, either."""
        parameters = self._completed
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        marks = marks_of_use(parameters, engine.mesh.device)
        dtype = DTYPES.get(engine.plan.comm_hook or "")
        average([*map(local, gradients), marks], engine.mesh.group("dp"), self._bucket_bytes, dtype)
        take_from_others(parameters, gradients, marks)

    def _require_all_used(self, engine: Engine) -> None:
        if self._checked or (self._replica is None and self._own_group is None):
            return
        self._checked = True
        unused = [name for name, p in engine.module.named_parameters() if p.requires_grad and p.grad is None]
        if self._find_unused:
            return
        if self._own_group is not None:
            unused = _unused_in_all_parts(engine, unused)
        if unused:
            raise ModelError(
                f"These parameters had no part in the loss of the first step: {', '.join(unused[:5])}"
                f"{' and more' if len(unused) > 5 else ''}. Replicas cannot agree on their gradients. Freeze them with "
                "requires_grad_(False), or write plugins=[pf.plugins.DataParallel(find_unused_parameters=True)]."
            )

    def describe(self) -> str:
        """Returns one line for the printed plan."""
        return f"data parallel over {self.degree or 'all'} ranks: gradients averaged in buckets during backward"


def _unused_in_all_parts(engine: Engine, unused: list[str]) -> list[str]:
    """What a replica in parts has not used anywhere (a stage may hold what only another one used), of any replica.

    What one rank refuses, all refuse.
    """
    mesh, without = engine.mesh, set(unused)
    if mesh.degree("pp") > 1:
        trained = [name for name, parameter in engine.module.named_parameters() if parameter.requires_grad]
        used = mesh.gather_texts(json.dumps([name for name in trained if name not in without]), ("pp",))
        without -= {name for text in used for name in json.loads(text)}
    said = mesh.gather_texts(json.dumps([name for name in unused if name in without]))
    return list(dict.fromkeys(name for text in said for name in json.loads(text)))


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


class SharedBuffers(nn.Module):
    """A task's steps, whose buffers every replica goes on with from the first one: running statistics, say.

    Args:
        steps: The steps, called as ``steps(name, batch)``.
        group: The replicas.
        bucket_bytes: How much is sent at once.
    """

    def __init__(self, steps: nn.Module, group: ProcessGroup, bucket_bytes: int) -> None:
        super().__init__()
        self.steps = steps
        self._group = (group,)
        self._bucket_bytes = bucket_bytes
        self._may_differ = False

    def begin_step(self) -> None:
        """Gives out the buffers that the last step has left."""
        self._give()
        self._may_differ = True

    def forward(self, step: str, batch: Any) -> Any:
        """Runs a step; in evaluation replicas see the same buffers, too."""
        if self._may_differ and not torch.is_grad_enabled():
            self._give()
            self._may_differ = False
        return self.steps(step, batch)

    def _give(self) -> None:
        broadcast(list(self.steps.buffers()), self._group[0], self._bucket_bytes)


def _is_shared_out(parameter: nn.Parameter) -> bool:
    """Whether replicas hold different parts of a parameter, so that none averages it."""
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and not {"dp", "dp_inner"}.isdisjoint(mesh.mesh_dim_names or ())


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
