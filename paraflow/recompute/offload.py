"""Blocks whose activations wait on the host between forward and backward."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from paraflow.parts import is_spread, local

MIN_BYTES = 2**16
"""Smaller tensors stay on the device: a copy of them takes longer to start than to run."""


class Offloaded:
    """The forward of a block whose activations are copied to the host, and back one block ahead of backward.

    On CUDA the copies go to pinned memory and run beside the computation. Elsewhere the same is done, from the host to
    the host. Parameters stay where they are, gathered ones too; a tensor that backward needs twice is copied once.

    Args:
        block: The block.
        waiting: What the blocks of a model share.
    """

    def __init__(self, block: nn.Module, waiting: Waiting) -> None:
        self._forward: Callable[..., Any] = block.forward
        self._block = block
        self._waiting = waiting

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the block; the arguments and results are those of its forward."""
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        visit = self._waiting.begin(self._block)
        with torch.autograd.graph.saved_tensors_hooks(visit.pack, _unpack):
            out = self._forward(*args, **kwargs)
        visit.end()
        return out


class Waiting:
    """The copies on the host, and the order of the blocks that made them.

    Args:
        min_bytes: The smallest tensor that is copied.
    """

    def __init__(self, min_bytes: int = MIN_BYTES) -> None:
        self.min_bytes = min_bytes
        self._copies: dict[int, list[tuple[_Place, weakref.ref[_Copy]]]] = {}
        self._storages: dict[int, StorageWeakRef] = {}
        self._link: _Link | None = None
        self._last: weakref.ref[_Visit] | None = None

    def begin(self, block: nn.Module) -> _Visit:
        """Returns what takes the activations of one call of a block."""
        before = None if self._last is None else self._last()
        if before is not None and before.before is not None and (earlier := before.before()) is not None:
            earlier.let_go()
        if before is None:
            self._forget()
        visit = _Visit(self, before, _storages_of(block))
        self._last = weakref.ref(visit)
        return visit

    def copy_of(self, tensor: torch.Tensor) -> tuple[_Copy, torch.Tensor]:
        """Returns the host's copy of what a tensor lies in, made now if there is none, and what was copied."""
        storage = tensor.untyped_storage()
        place = _place_of(tensor, storage)
        known = self._storages.get(storage._cdata)
        if known is None:
            # The reference keeps the address from being given to another storage.
            self._storages[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._copies[storage._cdata] = []
        base = _bytes_of(storage, tensor.device, place)
        for made, reference in self._copies[storage._cdata]:
            if made == place and (copy := reference()) is not None:
                return copy, base
        copy = _Copy(base, self.link(tensor.device), place.start)
        self._copies[storage._cdata].append((place, weakref.ref(copy)))
        return copy, base

    def link(self, device: torch.device) -> _Link:
        """The way to the host."""
        if self._link is None or self._link.device != device:
            self._link = _CudaLink(device) if device.type == "cuda" else _Link(device)
        return self._link

    def _forget(self) -> None:
        """Leaves out storages that are gone, when a new forward begins."""
        gone = [key for key, held in self._storages.items() if held.expired()]  # type: ignore[no-untyped-call]
        for key in gone:
            del self._storages[key], self._copies[key]


@dataclass(frozen=True)
class _Place:
    """Bytes of a storage, as they were at one version of it."""

    start: int
    stop: int
    version: int


class _Link:
    """Copies between a device and the host, one after another; here the device is the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def to_host(self, base: torch.Tensor) -> torch.Tensor:
        return base.clone()

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host.clone()

    def mark(self) -> Any:
        return None

    def wait(self, mark: Any) -> None:
        """Has what comes next wait for the copies before a mark."""

    @property
    def is_done_at_once(self) -> bool:
        """Whether a copy is there when the call returns."""
        return True


class _CudaLink(_Link):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def to_host(self, base: torch.Tensor) -> torch.Tensor:
        host = torch.empty(base.shape, dtype=base.dtype, pin_memory=True)
        self._copy(host, base)
        return host

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        base = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        self._copy(base, host)
        base.record_stream(self._stream)  # a graph that is dropped in between frees it while it is written
        return base

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)

    def mark(self) -> Any:
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        torch.cuda.current_stream(self.device).wait_event(mark)

    @property
    def is_done_at_once(self) -> bool:
        return False


class _Copy:
    """Bytes of a storage on the host, and where they began in it."""

    def __init__(self, base: torch.Tensor, link: _Link, start: int) -> None:
        self.host = link.to_host(base)
        self.link = link
        self.start = start
        self.fetched: weakref.ref[_Fetched] | None = None  # by whichever block is first in backward

    def fetch(self) -> _Fetched:
        there = None if self.fetched is None else self.fetched()
        if there is None:
            base = self.link.to_device(self.host)
            there = _Fetched(base, self.link.mark())
            self.fetched = weakref.ref(there)
        return there


@dataclass(eq=False)
class _Fetched:
    base: torch.Tensor
    mark: Any


@dataclass(frozen=True)
class _Parked:
    """What autograd holds in the place of a tensor."""

    visit: _Visit
    copy: _Copy
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    def of(self, base: torch.Tensor) -> torch.Tensor:
        width = self.dtype.itemsize
        typed = base[: base.numel() // width * width].view(self.dtype)
        return typed.as_strided(self.size, self.stride, (self.start - self.copy.start) // width)


@dataclass(eq=False)
class _Visit:
    """One call of a block: what it saved for backward.

    Only what autograd holds keeps it alive, so that a graph which is dropped takes its copies with it.
    """

    waiting: Waiting
    previous: _Visit | None
    own: frozenset[int]
    uses: Counter[_Copy] = field(default_factory=Counter)
    left: Counter[_Copy] = field(default_factory=Counter)
    leaving: dict[_Copy, torch.Tensor] = field(default_factory=dict)
    there: dict[_Copy, _Fetched] = field(default_factory=dict)
    entered: bool = False
    left_at: Any = None

    def __post_init__(self) -> None:
        self.before = None if self.previous is None else weakref.ref(self.previous)
        self.previous = None

    def pack(self, tensor: torch.Tensor) -> Any:
        """Called by autograd with each tensor that backward needs."""
        if not self._is_offloaded(tensor):
            return tensor
        copy, base = self.waiting.copy_of(tensor)
        self.uses[copy] += 1
        self.leaving[copy] = base
        start = int(tensor.storage_offset()) * tensor.element_size()
        return _Parked(self, copy, tensor.dtype, tuple(tensor.shape), tensor.stride(), start)

    def _is_offloaded(self, tensor: torch.Tensor) -> bool:
        if is_spread(tensor) or type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False
        if tensor.nbytes < self.waiting.min_bytes or tensor.is_conj() or tensor.is_neg():
            return False
        # A gathered weight is a parameter, or a view of one, and is gathered again for backward where need be.
        return not isinstance(tensor._base, nn.Parameter) and tensor.untyped_storage()._cdata not in self.own

    def end(self) -> None:
        """The forward is over: what has left may be freed."""
        for copy in self.leaving:
            self.left_at = copy.link.mark()
            if copy.link.is_done_at_once:
                self.leaving.clear()
            return

    def let_go(self) -> None:
        """Frees what was copied, in the order of the device's work, which waits for the copies."""
        for copy in self.leaving:
            copy.link.wait(self.left_at)
            break
        self.leaving.clear()

    def unpack(self, parked: _Parked) -> torch.Tensor:
        """Called by autograd with what `pack` gave; the first call fetches this block, and starts on the one before."""
        if not self.entered:
            self.entered = True
            self.left = Counter(self.uses)
            self.fetch()
            before = None if self.before is None else self.before()
            if before is not None:
                before.fetch()
        base = self.leaving.get(parked.copy)
        if base is None:
            there = self.there.get(parked.copy) or parked.copy.fetch()
            parked.copy.link.wait(there.mark)
            base = there.base
        self._count(parked.copy)
        return parked.of(base)

    def fetch(self) -> None:
        """Starts to copy back what is not there."""
        for copy in self.uses:
            if copy not in self.there and copy not in self.leaving:
                self.there[copy] = copy.fetch()

    def _count(self, copy: _Copy) -> None:
        self.left[copy] -= 1
        if self.left[copy] <= 0:
            self.there.pop(copy, None)
            del self.left[copy]
            self.entered = bool(self.left)  # a second backward fetches again


def _unpack(saved: Any) -> torch.Tensor:
    return saved.visit.unpack(saved) if isinstance(saved, _Parked) else saved


def _storages_of(block: nn.Module) -> frozenset[int]:
    tensors = (*block.parameters(), *block.buffers())
    return frozenset(local(tensor).untyped_storage()._cdata for tensor in tensors)


def _place_of(tensor: torch.Tensor, storage: torch.UntypedStorage) -> _Place:
    """The bytes that a tensor spans; the whole storage where that is most of it, since others may span the rest."""
    width, whole = tensor.element_size(), storage.nbytes()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * width
    if 2 * span * width > whole:
        return _Place(0, whole, tensor._version)
    return _Place(start, start + span * width, tensor._version)


def _bytes_of(storage: torch.UntypedStorage, device: torch.device, place: _Place) -> torch.Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    part: torch.Tensor = whole[place.start : place.stop]
    return part
