"""A model that torch's ``fully_shard`` has sharded unit by unit, and how its steps are called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paraflow.collectives import broadcast
from paraflow.data.batch import children
from paraflow.errors import ModelError
from paraflow.parts import is_spread, keep_on_host, local
from paraflow.plugins.stale import Changes, Originals
from paraflow.plugins.units import Unit
from paraflow.step import Boundary

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_MARK = "_paraflow_sharding"
_BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Layout:
    """How a model is sharded: what cannot be changed once it is.

    Attributes:
        mesh: The ranks; over the last dimension a parameter is sharded, over one before it replicated.
        units: The names of the units.
        offloaded: Those that live on the host; ``""`` is what no unit holds.
        gathered_in: The dtype parameters are gathered in, or None for their own.
        reduced_in: The dtype gradients are reduced in, or None for their own.
    """

    mesh: DeviceMesh
    units: tuple[str, ...]
    offloaded: frozenset[str]
    gathered_in: torch.dtype | None
    reduced_in: torch.dtype | None


class Sharding:
    """A sharded model.

    Attributes:
        root: Holds the model; torch gathers what a forward through it needs.
        layout: How it is sharded.
        originals: The parameters it had before.
        changes: Sees what is changed while it is gathered.
    """

    def __init__(self, root: _Root, layout: Layout, originals: Originals) -> None:
        self.root: Any = root
        self.layout = layout
        self.originals = originals
        self.changes = Changes(self.sharded())
        self._in_step, self._broken = False, False
        self._first_run = 0
        self._reduces, self._lets_go, self._is_last = True, True, True
        self._were_gathered = False

    def set_reshard_after_forward(self, wanted: bool | int) -> None:
        """Whether units let go of what they gathered between forward and backward, or to how many ranks they shard it.

        What no unit holds stays: backward begins with it.
        """
        for unit in self.units():
            if unit is not self.root:
                unit.set_reshard_after_forward(wanted, recurse=False)

    def before_backward(self, *, reduces: bool, lets_go: bool, is_last: bool = True) -> None:
        """Says what the next backward does.

        Args:
            reduces: Whether it reduces gradients.
            lets_go: Whether it lets go of gathered parameters.
            is_last: Whether no forward waits for its backward after it; torch forgets then in which order units ran.
        """
        if not reduces and self.layout.reduced_in is not None and not self._were_gathered:
            self._gather_each()
        if reduces != self._reduces:
            self.root.set_requires_gradient_sync(reduces)
        if lets_go != self._lets_go:
            self.root.set_reshard_after_backward(lets_go)
        if is_last != self._is_last:
            self.root.set_is_last_backward(is_last)
        self._reduces, self._lets_go, self._is_last = reduces, lets_go, is_last

    def finish_backward(self) -> None:
        """Ends a backward that may have left out torch's hooks: they stand where modules are entered and left.

        It is torch's own end of a backward, which does nothing for a second time.
        """
        self.root._get_fsdp_state()._root_post_backward_final_callback()

    def _gather_each(self) -> None:
        """Gathers each unit once: torch looks for gradients that wait in another dtype in units that never ran, too."""
        self._were_gathered = True
        for unit in self.units():
            if any(not hasattr(held, "_unsharded_param") for held in _held_by(unit)):
                unit.unshard()
                unit.reshard()

    def let_go(self) -> None:
        """Frees what is still gathered: it would be stale once the shards have changed."""
        for unit in self.units():
            unit.reshard()

    def prepare(self) -> None:
        """Has torch look at the parameters now rather than in the first forward: it may give shards other memory."""
        self.root._get_fsdp_state()._lazy_init()

    def units(self) -> Iterator[Any]:
        """Returns the sharded modules, beginning with the root."""
        return (layer for layer in self.root.modules() if hasattr(layer, "_get_fsdp_state"))

    def sharded(self) -> Iterator[Any]:
        """Returns what torch keeps of each parameter, unit by unit."""
        for unit in self.units():
            yield from _held_by(unit)

    def begin_step(self) -> None:
        """Begins a step: nothing is left of one that was broken off."""
        if self._in_step:
            self.reset()
        self._require_whole()
        self._in_step = True

    def end_step(self) -> None:
        """Ends it: gradients are reduced, and nothing waits."""
        self._in_step = False

    def begin_forward(self) -> None:
        """Marks where torch's list of the units that ran begins anew."""
        self._require_whole()
        self._first_run = len(self._run_order())

    def ran(self) -> list[Any]:
        """Returns torch's parameter groups in the order in which the last forward ran their units."""
        return self._run_order()[self._first_run :]

    def _run_order(self) -> list[Any]:
        order: list[Any] = getattr(self.root._get_fsdp_state()._comm_ctx, "post_forward_order", [])
        return order

    def reset(self) -> None:
        """Ends a forward or a step that has raised, and drops its gradients, where torch can (from 2.13 on)."""
        self._in_step = False
        if self.root._get_fsdp_state()._is_root is None:  # nothing has run
            return
        if not hasattr(self.root, "reset_iter_state"):
            self._broken = True
            return
        self.root.reset_iter_state()
        self._run_order().clear()
        for held in self.sharded():
            held.unsharded_accumulated_grad = None
            if hasattr(held, "_unsharded_param"):
                held._unsharded_param.grad = None

    def _require_whole(self) -> None:
        if self._broken:
            raise ModelError(
                "An error has broken off a forward or a step of this sharded model, and torch "
                f"{torch.__version__} cannot begin another. Make the model anew and load its state, or use torch 2.13."
            )


def _held_by(unit: Any) -> Iterator[Any]:
    for group in groups_of(unit._get_fsdp_state()):
        yield from group.fsdp_params


def groups_of(state: Any) -> Any:
    """Returns the parameter groups of torch's state of a module; before 2.13 there was one at most."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return groups


def is_sharded(model: nn.Module) -> bool:
    """Whether an earlier engine has sharded a model."""
    return _MARK in model.__dict__


def shard(model: nn.Module, units: Sequence[Unit], layout: Layout) -> Sharding:
    """Shards a model unit by unit, the innermost first; one that an earlier engine has sharded alike is taken as it is.

    Args:
        model: The user's module. Its class and the names of its parameters do not change.
        units: Its units.
        layout: How.

    Raises:
        ModelError: It is sharded already, in another way.
    """
    earlier: Sharding | None = model.__dict__.get(_MARK)
    if earlier is not None:
        _require_same(model, earlier.layout, layout)
        return earlier
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    originals = Originals(model)
    for parameter in model.parameters():
        if not is_spread(parameter) and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()  # torch shards no other layout
    root = _Root(model)
    policy = MixedPrecisionPolicy(layout.gathered_in, layout.reduced_in, cast_forward_inputs=False)
    for unit in sorted(units, key=lambda unit: -unit.name.count(".")):
        fully_shard(unit.module, mesh=layout.mesh, mp_policy=policy, offload_policy=_offload(unit.name, layout))
    fully_shard(
        root, mesh=layout.mesh, reshard_after_forward=False, mp_policy=policy, offload_policy=_offload("", layout)
    )
    sharding = Sharding(root, layout, originals)
    for held in sharding.sharded():
        if held.offload_to_cpu:
            keep_on_host(held.sharded_param)
    model.__dict__[_MARK] = sharding  # not as a submodule
    return sharding


def _offload(name: str, layout: Layout) -> Any:
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    pinned = layout.mesh.device_type != "cpu"
    return CPUOffloadPolicy(pin_memory=pinned) if name in layout.offloaded else OffloadPolicy()


def _require_same(model: nn.Module, earlier: Layout, wanted: Layout) -> None:
    if earlier == wanted:
        return
    raise ModelError(
        f"{type(model).__name__} has been sharded by an earlier Trainer: {_in_words(earlier)}. This one would have "
        f"{_in_words(wanted)}. Use the same plan, or make the model anew and load its state."
    )


def _in_words(layout: Layout) -> str:
    ranks = " × ".join(map(str, layout.mesh.shape))
    host = f", {len(layout.offloaded)} of them on the host" if layout.offloaded else ""
    dtypes = {"gathered": layout.gathered_in, "reduced": layout.reduced_in}
    halves = [f"{what} in {dtype}" for what, dtype in dtypes.items() if dtype is not None]
    return ", ".join([f"{ranks} ranks and {len(layout.units)} units{host}", *halves])


class _Root(nn.Module):
    """Holds the model: what torch gathers for a forward through it, and reduces after a backward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, steps: nn.Module, step: str, batch: Any) -> tuple[list[torch.Tensor], _Opaque]:
        returned = steps(step, batch)
        return list(_losses(returned)), _Opaque(returned)


class _Opaque:
    """What a step returned: torch looks for what backward starts from in containers and dataclasses, and not here."""

    def __init__(self, returned: Any) -> None:
        self.returned = returned


def _losses(returned: Any) -> Iterator[torch.Tensor]:
    """What backward may start from: tensors of one element, among them the loss; or what goes on to other ranks."""
    if isinstance(returned, Boundary):
        yield from (tensor for tensor in returned.tensors if tensor.requires_grad)
        return
    if isinstance(returned, torch.Tensor):
        if returned.numel() == 1 and returned.requires_grad:
            yield returned
        return
    for child in children(returned):
        yield from _losses(child)


class Entrance(nn.Module):
    """How the engine calls a sharded model's steps.

    Args:
        steps: The engine's steps.
        sharding: The model.
        data_group: The ranks that must have the same running statistics, or None.

    Attributes:
        forwarded: Whether the micro-batch has had a forward with gradients.
        begins: What the backward of the last forward may begin with.
    """

    def __init__(self, steps: nn.Module, sharding: Sharding, data_group: ProcessGroup | None) -> None:
        super().__init__()
        self.steps = steps
        self._sharding = (sharding,)
        self._data_group = data_group
        self._statistics = list(_statistics(sharding.root.module)) if data_group is not None else []
        self.forwarded = False
        self.begins: list[torch.Tensor] = []

    def forward(self, step: str, batch: Any) -> Any:
        """Runs a step; what it gathers is let go of at once where no backward follows."""
        sharding = self._sharding[0]
        self._share_statistics()
        sharding.begin_forward()
        try:
            self.begins, opaque = sharding.root(self.steps, step, batch)
        except BaseException as error:
            sharding.reset()
            if "mixed torch.Tensor and DTensor" in str(error):
                raise ModelError(_used_outside(sharding)) from error
            raise
        if not torch.is_grad_enabled():
            sharding.changes.require_none()
            sharding.let_go()
        return opaque.returned

    def _share_statistics(self) -> None:
        """Every rank goes on from the first rank's running statistics, once a micro-batch, as replicas do."""
        again = torch.is_grad_enabled() and self.forwarded
        self.forwarded = torch.is_grad_enabled()
        if self._statistics and not again:
            assert self._data_group is not None
            broadcast(self._statistics, self._data_group, _BUCKET_BYTES)


def _statistics(model: nn.Module) -> Iterator[torch.Tensor]:
    for layer in model.modules():
        if getattr(layer, "track_running_stats", False):
            yield from layer.buffers(recurse=False)


def _used_outside(sharding: Sharding) -> str:
    units = ", ".join(sharding.layout.units)
    return (
        "A weight of a sharded unit was used outside of that unit's forward, where it is not gathered. The units are "
        f"{units or 'none'}. Name others with FSDP(units=[...]) or the model's attribute fsdp_units, without the one "
        "whose weight is used: what no unit holds is gathered for the whole step."
    )


def same_everywhere(model: nn.Module, group: ProcessGroup) -> None:
    """Gives every rank the first rank's parameters and buffers, before each takes its shards."""
    tensors = [local(tensor) for tensor in (*model.parameters(), *model.buffers())]
    broadcast([tensor for tensor in tensors if not tensor.is_meta], group, _BUCKET_BYTES)
