"""Follows each allocation of a training step, and says what it was for.

torch's profiler reports each allocation and release of torch's allocator on the thread that makes it, with the
operator around it. Memory that was there before the step is what is found in parameters, gradients, and the
optimizer's state. Everything else is known by what becomes of it:

    gathered      whole parameters that `fully_shard` gathers from shards: allocated in its ranges of that name
    gradients     what a parameter has as its gradient when backward is done with it, and when the optimizer begins
    activations   what else is there when a backward begins
    transient     everything else: results of operators, buffers of collectives, temporaries of the optimizer, and
                  what is recomputed in backward

What another library allocates (gloo's own buffers) is not seen. Neither is a release on another thread, as gloo's,
which may be the last to hold a buffer; so the buffers of collectives are watched, and looked for at each of them and at
each gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _EventType
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin
from torch.multiprocessing.reductions import StorageWeakRef
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

_RANGE, _BUFFERS = "FSDP::", "FSDP::all_gather "
_GATHERS = ("FSDP::all_gather_copy_out", "FSDP::pre_forward", "FSDP::pre_backward")
_MARK, _GRADIENT, _BUFFER, _GONE = (f"benchmark: {what} " for what in ("mark", "gradient", "buffer", "gone"))


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
        return {s.data_ptr(): Block(s.nbytes(), self.kind, self.on_host) for s in self.storages()}

    def storages(self) -> Iterator[torch.UntypedStorage]:
        """Returns the memory itself, where there is any."""
        return (s for s in (local(tensor).untyped_storage() for tensor in self.tensors) if s.nbytes())


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
        known: What is there before it; nobody else should hold on to these gradients.
        host_optimizer: Whether what the optimizer allocates in its step stands for host memory.
    """

    def __init__(self, known: Iterable[Known], *, host_optimizer: bool = False) -> None:
        self._live: dict[int, Block] = {}
        self._storages: dict[int, StorageWeakRef] = {}
        for one in known:
            self._live |= one.blocks()
            self._storages |= {s.data_ptr(): StorageWeakRef(s) for s in one.storages()}  # type: ignore[no-untyped-call]
        self._before = list(self._live.values())
        self._host_optimizer = host_optimizer
        self._gradients: dict[int, Block] = {}
        self._in_update = False
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._around = ExitStack()
        self._buffers: dict[int, tuple[int, StorageWeakRef]] = {}
        self._made = 0
        self._watched: dict[str, Block | None] = {}

    def begin(self, model: nn.Module) -> None:
        """Begins to follow; the gradients of the step before are let go of, as each step begins with that."""
        # The profiler does not report the release of what was there before it.
        for parameter in model.parameters():
            parameter.grad = None
        # Those of replicas stay: they lie in buckets that are made once.
        gone = [address for address, storage in self._storages.items() if storage.expired()]  # type: ignore[no-untyped-call]
        self._live = {address: block for address, block in self._live.items() if address not in gone}
        for tensor in _whole_parameters(model):
            hook = tensor.register_post_accumulate_grad_hook(self._note_gradient)  # type: ignore[no-untyped-call]
            self._around.callback(hook.remove)
        self._around.enter_context(_replaced(DefaultAllocMixin, "allocate", self._noting))
        self._around.enter_context(self._profiler)

    def backward(self) -> None:
        """To be called when a backward is about to begin."""
        self._mark(_MARK + "backward")

    def update(self, gradients: Known) -> None:
        """To be called when the optimizer is about to begin."""
        self._gradients |= gradients.blocks()
        self._mark(_MARK + "update")

    def updated(self) -> None:
        """To be called when the optimizer is done."""
        self._mark(_MARK + "updated")

    def end(self) -> Followed:
        """Ends the step, and returns what it allocated."""
        self._around.close()
        return self._follow(sorted(_events(self._profiler), key=lambda event: event.time))

    def _mark(self, name: str) -> None:
        gone = [number for number, (_, storage) in self._buffers.items() if storage.expired()]  # type: ignore[no-untyped-call]
        for number in gone:
            _range(f"{_GONE}{number} {self._buffers.pop(number)[0]}")
        _range(name)

    def _note_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._mark(f"{_GRADIENT}{local(parameter.grad).untyped_storage().data_ptr()}")

    def _noting(self, allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Allocates as `fully_shard` does for its collectives, and notes the buffer."""

        def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
            buffer = allocate(*args, **kwargs)
            storage = buffer.untyped_storage()
            self._made += 1
            self._mark(f"{_BUFFER}{self._made} {storage.data_ptr()}")
            self._buffers[self._made] = storage.data_ptr(), StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            return buffer

        return noted

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
            block = self._live[event.address] = Block(event.size, event.kind, on_host)
            yield 1, block
        elif event.size < 0:
            gone = self._live.pop(event.address, None)
            if gone is not None:
                yield -1, gone
        elif event.name.startswith(_GRADIENT):
            self._tell(int(event.name.removeprefix(_GRADIENT)), Block(0, GRADIENTS))
        elif event.name.startswith((_BUFFER, _GONE)):
            yield from self._watch(*event.name.split()[1:])
        else:
            yield event.name.removeprefix(_MARK)
            self._look_around(event.name.removeprefix(_MARK))

    def _watch(self, what: str, number: str, address: str) -> Iterator[_Change]:
        there = self._live.get(int(address))
        if what == "buffer":
            self._watched[number] = there
        elif there is not None and there is self._watched[number]:  # or its release was seen
            yield -1, self._live.pop(int(address))

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
    kind: str | None = None
    on_host: bool = False


def _kind_by_place(around: str, sharding: str) -> str | None:
    """What memory is for by the range right around it, and by the innermost one of ``fully_shard``."""
    if f"{sharding} ".startswith(_BUFFERS):
        return TRANSIENT
    return GATHERED if around.startswith(_GATHERS) else None


def _events(profiler: profile) -> Iterator[_Event]:
    results: Any = profiler.profiler
    left = [(event, "", "", False) for event in results.kineto_results.experimental_event_tree()]
    while left:
        event, around, sharding, on_host = left.pop()
        if event.tag == _EventType.Allocation:
            what, kind = event.extra_fields, _kind_by_place(around, sharding)
            yield _Event(event.start_time_ns, what.alloc_size, what.ptr, "", kind, on_host)
        elif event.name.startswith("benchmark: ") and event.name != TO_HOST:
            yield _Event(event.start_time_ns, name=event.name)
        sharding = event.name if event.name.startswith(_RANGE) else sharding
        on_host = on_host or event.name == TO_HOST
        left += [(child, event.name, sharding, on_host) for child in event.children]


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


def _range(name: str) -> None:
    with record_function(name):
        pass


def marked_as_host(owner: Any, method: str) -> AbstractContextManager[None]:
    """Has what a method allocates stand for host memory, where the device of a step is the host itself."""

    def marked(plain: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with record_function(TO_HOST):
                return plain(*args, **kwargs)

        return run

    return _replaced(owner, method, marked)


@contextmanager
def _replaced(owner: Any, method: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    plain = getattr(owner, method)
    setattr(owner, method, make(plain))
    try:
        yield
    finally:
        setattr(owner, method, plain)
