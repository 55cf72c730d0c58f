"""Follows each allocation of a training step, and says what it was for.

torch's profiler reports each allocation and release of torch's allocator on the thread that makes it, with the
operator around it. Memory that was there before the step is what is found in parameters, gradients, and the
optimizer's state. Everything else is known by what becomes of it:

    gathered      whole parameters that `fully_shard` gathers from shards: allocated in its ranges of that name
    gradients     what a parameter has as its gradient when backward is done with it, and when the optimizer begins
    activations   what else is there when a backward begins
    transient     everything else: results of operators, buffers of collectives, temporaries of the optimizer, and
                  what is recomputed in backward

What another library allocates (gloo's own buffers) is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from paraflow.parts import local
from paraflow.plugins.sharding import groups_of

PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER = "parameters", "gathered", "gradients", "optimizer"
ACTIVATIONS, TRANSIENT = "activations", "transient"
KINDS = (PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER, ACTIVATIONS, TRANSIENT)
STATES = (PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER)
"""What the literature calls model states, with what is gathered of them."""

TO_HOST = "benchmark: to the host"
"""A range in which what is allocated stands for host memory."""

_GATHERS = ("FSDP::all_gather_copy_out", "FSDP::pre_forward", "FSDP::pre_backward")
_MARK, _GRADIENT = "benchmark: mark ", "benchmark: gradient "


@dataclass(eq=False)
class Block:
    """A piece of memory, from its allocation to its release.

    Attributes:
        size: Bytes.
        kind: What it is for; None until that is known.
        on_host: Whether it stands for host memory.
    """

    size: int
    kind: str | None = None
    on_host: bool = False


@dataclass(frozen=True)
class Known:
    """Tensors that are there before a step, or at a moment of it.

    Attributes:
        kind: What they are for.
        tensors: They.
        on_host: Whether they stand for host memory.
    """

    kind: str
    tensors: Sequence[torch.Tensor]
    on_host: bool = False

    def blocks(self) -> dict[int, Block]:
        """Returns their memory by its address; what several share is there once."""
        storages = (local(tensor).untyped_storage() for tensor in self.tensors)
        found = {storage.data_ptr(): Block(storage.nbytes(), self.kind, self.on_host) for storage in storages}
        return {address: block for address, block in found.items() if block.size}


@dataclass
class Followed:
    """What a step allocated, moment by moment, in bytes.

    Attributes:
        before: Bytes by kind before the step: what is there between steps, gradients included.
        most: The most bytes of each kind, each at a moment of its own.
        peak: The most that the device holds at once.
        parameters: The most that parameters take, gathered ones included.
        states: The most that the model's states take at once, gathered parameters included.
        update: The most that the optimizer's step takes beside what is there when it begins.
        host: The most that the host holds, where it is another side.
    """

    before: dict[str, int]
    most: dict[str, int]
    peak: int = 0
    parameters: int = 0
    states: int = 0
    update: int = 0
    host: int = 0


class Recorder:
    """Follows one step.

    Args:
        known: What is there before it.
        host_optimizer: Whether what the optimizer allocates in its step stands for host memory.
    """

    def __init__(self, known: Iterable[Known], *, host_optimizer: bool = False) -> None:
        self._live: dict[int, Block] = {}
        for one in known:
            self._live |= one.blocks()
        self._before = list(self._live.values())
        self._host_optimizer = host_optimizer
        self._gradients: dict[int, Block] = {}
        self._in_update = False
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._hooks: list[Any] = []

    def begin(self, model: nn.Module) -> None:
        """Begins to follow; the gradients of the step before are let go of, as each step begins with that."""
        # The profiler does not report the release of what was there before it.
        for parameter in model.parameters():
            parameter.grad = None
        self._live = {address: block for address, block in self._live.items() if block.kind != GRADIENTS}
        self._hooks = [
            tensor.register_post_accumulate_grad_hook(_note_gradient)  # type: ignore[no-untyped-call]
            for tensor in _whole_parameters(model)
        ]
        self._profiler.__enter__()

    def backward(self) -> None:
        """To be called when a backward is about to begin."""
        _mark("backward")

    def update(self, gradients: Known) -> None:
        """To be called when the optimizer is about to begin."""
        self._gradients |= gradients.blocks()
        _mark("update")

    def updated(self) -> None:
        """To be called when the optimizer is done."""
        _mark("updated")

    def end(self) -> Followed:
        """Ends the step, and returns what it allocated."""
        self._profiler.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
        return self._follow(sorted(_events(self._profiler), key=lambda event: event.time))

    def _follow(self, events: Sequence[_Event]) -> Followed:
        there = list(self._live.values())
        changes = [change for event in events for change in self._changes(event)]
        return _add_up(self._before, there, changes)

    def _changes(self, event: _Event) -> Iterator[_Change]:
        """What an event does to the memory that is there; it also tells what blocks are for."""
        if event.size > 0:
            former = self._live.pop(event.address, None)
            if former is not None:  # released on another thread, or there before the profiler
                yield -1, former
            on_host = event.on_host or (self._in_update and self._host_optimizer)
            block = self._live[event.address] = Block(event.size, _kind_by_place(event), on_host)
            yield 1, block
        elif event.size < 0:
            gone = self._live.pop(event.address, None)
            if gone is not None:
                yield -1, gone
        elif event.name.startswith(_GRADIENT):
            self._tell(int(event.name.removeprefix(_GRADIENT)), Block(0, GRADIENTS))
        else:
            yield event.name.removeprefix(_MARK)
            self._look_around(event.name.removeprefix(_MARK))

    def _look_around(self, moment: str) -> None:
        if moment == "backward":
            for block in self._live.values():
                block.kind = block.kind or ACTIVATIONS
        elif moment == "update":
            for address, gradient in self._gradients.items():
                self._tell(address, gradient)
        self._in_update = moment == "update"

    def _tell(self, address: int, what: Block) -> None:
        block = self._live.get(address)
        if block is not None and block.kind in (None, GRADIENTS, ACTIVATIONS):
            block.kind, block.on_host = what.kind, what.on_host or block.on_host


_Change = tuple[int, Block] | str


def _add_up(before: Sequence[Block], there: Sequence[Block], changes: Sequence[_Change]) -> Followed:
    device, host = _by_kind(there), sum(block.size for block in there if block.on_host)
    found = Followed(_by_kind(before), dict(device), host=host)
    at_update: int | None = None
    for change in changes:
        if isinstance(change, str):
            at_update = sum(device.values()) + host if change == "update" else None
            continue
        sign, block = change
        if block.on_host:
            host += sign * block.size
        else:
            device[block.kind or TRANSIENT] += sign * block.size
        total = sum(device.values())
        found.host, found.peak = max(found.host, host), max(found.peak, total)
        found.most = {kind: max(size, found.most[kind]) for kind, size in device.items()}
        found.parameters = max(found.parameters, device[PARAMETERS] + device[GATHERED])
        found.states = max(found.states, sum(device[kind] for kind in STATES))
        if at_update is not None:
            found.update = max(found.update, total + host - at_update)
    return found


def _by_kind(blocks: Sequence[Block]) -> dict[str, int]:
    """The bytes on the device."""
    return {kind: sum(b.size for b in blocks if b.kind == kind and not b.on_host) for kind in KINDS}


@dataclass(frozen=True)
class _Event:
    """An allocation (size > 0), a release (size < 0) or a mark (size 0)."""

    time: int
    size: int = 0
    address: int = 0
    name: str = ""
    around: str = ""
    on_host: bool = False


def _kind_by_place(event: _Event) -> str | None:
    return GATHERED if event.around.startswith(_GATHERS) else None


def _events(profiler: profile) -> Iterator[_Event]:
    results: Any = profiler.profiler
    left = [(event, "", False) for event in results.kineto_results.experimental_event_tree()]
    while left:
        event, around, on_host = left.pop()
        if event.tag == _EventType.Allocation:
            what = event.extra_fields
            yield _Event(event.start_time_ns, what.alloc_size, what.ptr, "", around, on_host)
        elif event.name.startswith((_MARK, _GRADIENT)):
            yield _Event(event.start_time_ns, name=event.name)
        on_host = on_host or event.name == TO_HOST
        left += [(child, event.name, on_host) for child in event.children]


def _mark(name: str) -> None:
    with record_function(_MARK + name):
        pass


def _note_gradient(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        with record_function(f"{_GRADIENT}{local(parameter.grad).untyped_storage().data_ptr()}"):
            pass


def _whole_parameters(model: nn.Module) -> Iterator[torch.Tensor]:
    """What backward gives gradients to: the parameters, or what `fully_shard` gathers of them."""
    sharded = False
    for layer in model.modules():
        if hasattr(layer, "_get_fsdp_state"):
            sharded = True
            for group in groups_of(layer._get_fsdp_state()):
                yield from (one._unsharded_param for one in group.fsdp_params)
    if not sharded:
        yield from model.parameters()


@contextmanager
def marked_as_host(owner: Any, method: str) -> Iterator[None]:
    """Has what a method allocates stand for host memory, where the device of a step is the host itself."""
    plain = getattr(owner, method)

    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function(TO_HOST):
            return plain(*args, **kwargs)

    setattr(owner, method, marked)
    try:
        yield
    finally:
        setattr(owner, method, plain)
