"""Watches a forward: which operators it calls, what each takes and makes, and what is kept of it for backward."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paraflow import parts
from paraflow.recompute.operations import written_by

Clock = Callable[[Callable[[], Any], Any, Any, Any], tuple[Any, float]]
"""From a call that runs an operator, the operator and its arguments, to what it returns and its seconds."""


_NOT_IN_BACKWARD = ("fsdp", "c10d")
"""Namespaces of operators that backward does not go through: what gathers parameters, and other collectives."""


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Returns the memory of a tensor on this rank; its ``_cdata`` tells it from others as long as it is held."""
    return parts.local(tensor).untyped_storage()


def tensors_in(*values: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested containers."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            yield leaf


@dataclass
class Call:
    """One operator call.

    Attributes:
        operator: The operator.
        name: Its name, such as ``"aten.addmm.default"``.
        occurrence: Which of the operator's calls in the part it is, from 0.
        seconds: What it took.
        made: The memory that it made, by key: not that of its arguments.
        written: Whether something that it made was written to later.
        saved: Bytes kept for backward so far, when the next call began; the inputs of the part left out.
        touched: Bytes of the floating-point tensors it read and made or wrote: backward makes a gradient for each.
        weights: The part of `touched` that are parameters or buffers.
    """

    operator: Any
    name: str
    occurrence: int
    seconds: float
    made: dict[int, int]
    written: bool = False
    saved: int = 0
    touched: int = 0
    weights: int = 0


@dataclass
class Recording:
    """What was seen of one part of a forward: a call of a block, or what lies between two.

    Attributes:
        name: The block's name; empty outside the blocks.
        inputs: The memory of its arguments.
        saved: The memory kept for backward; once the part is over, of a block only what others can hold too.
        inner: Bytes of the rest of what a block keeps: the memory itself is given up.
        outputs: The memory of what it returned.
        reads: Bytes of the gradient that backward makes for each memory that was read; of what was joined to others,
            that is a part of the gradient of the whole.
        parameters: Those of `reads` that are parameters or buffers.
        calls: Its operator calls, in order.
        last_save: How many calls had run when the last tensor was kept.
        seconds: Of its forward.
        writes_inputs: Whether it changes its arguments, so that it cannot be run again.
    """

    name: str
    inputs: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    saved: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    outputs: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    reads: dict[int, int] = field(default_factory=dict)
    parameters: set[int] = field(default_factory=set)
    calls: list[Call] = field(default_factory=list)
    last_save: int = 0
    seconds: float = 0.0
    writes_inputs: bool = False
    inner: dict[int, int] = field(default_factory=dict)
    _counts: Counter[str] = field(default_factory=Counter)
    _makers: dict[int, Call] = field(default_factory=dict)
    _sofar: int = 0

    def save(self, storage: torch.UntypedStorage) -> None:
        """Notes memory that is kept for backward."""
        key = storage._cdata
        if key not in self.saved:
            self.saved[key] = storage
            self._sofar += 0 if key in self.inputs else storage.nbytes()
        self.last_save = len(self.calls)

    def call(self, func: Any, args: Any, kwargs: Any, made: Any, seconds: float) -> None:
        """Notes an operator call."""
        self.close()
        read = {(s := storage_of(tensor))._cdata: (s, tensor) for tensor in tensors_in(args, kwargs)}
        fresh = {(s := storage_of(tensor))._cdata: (s, tensor) for tensor in tensors_in(made)}
        fresh = {key: value for key, value in fresh.items() if key not in read}
        for key in fresh.keys() & self._makers.keys():  # what was there before is gone: it is no longer called so
            earlier = self._makers.pop(key).made
            earlier[-len(earlier) - key] = earlier.pop(key)
        name, sizes = str(func), {key: s.nbytes() for key, (s, _) in fresh.items()}
        call = Call(func, name, self._counts[name], seconds, sizes)
        self._counts[name] += 1
        outside = getattr(func, "namespace", "") in _NOT_IN_BACKWARD or name.startswith("aten.empty")
        if outside:
            read = {}
        elif fresh or getattr(getattr(func, "_schema", None), "is_mutable", False):
            both = [*read.values(), *((storage_of(tensor), tensor) for tensor in tensors_in(made))]
            call.touched = sum(s.nbytes() for s, tensor in both if tensor.is_floating_point())
        if "convolution" in name and any(tensor.device.type == "cpu" for _, tensor in read.values()):
            # oneDNN makes the gradients in a layout of its own, and then copies them.
            call.touched += sum(s.nbytes() for s, _ in read.values())
        self._read(read.values(), sum(call.made.values()) if name.startswith("aten.cat") else 0)
        self.calls.append(call)
        self._makers.update(dict.fromkeys(fresh, call))

    def _read(self, read: Iterable[tuple[torch.UntypedStorage, torch.Tensor]], least: int) -> None:
        for storage, tensor in read:
            if tensor.is_floating_point():
                self.reads[storage._cdata] = max(storage.nbytes(), least, self.reads.get(storage._cdata, 0))

    def write(self, key: int) -> bool:
        """Notes that memory was written to; returns whether it was made here."""
        if key not in self._makers:
            return False
        self._makers[key].written = True
        return True

    def close(self) -> None:
        """Notes what has been kept up to the end of the last call."""
        if self.calls:
            self.calls[-1].saved = self._sofar

    def leave(self, outputs: Iterable[torch.Tensor]) -> None:
        """Ends a block's part; its memory is held on to only where others could hold it as well."""
        self.close()
        self.outputs = {s._cdata: s for s in map(storage_of, outputs)}
        shared = self.saved.keys() & (self.inputs.keys() | self.outputs.keys())
        self.inner = {key: storage.nbytes() for key, storage in self.saved.items() if key not in shared}
        self.saved = {key: self.saved[key] for key in shared}


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what is run inside, part by part: outside the blocks until `enter` says that a block is called.

    Args:
        own: The memory of parameters and buffers by key: it is there in any case.
        clock: How operators are timed.

    Attributes:
        parts: What was recorded, in the order of forward.
    """

    supports_higher_order_operators = True

    def __init__(self, own: dict[int, torch.UntypedStorage], clock: Clock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.own = own
        self.parts = [Recording("")]
        self._clock = clock
        self._paused = False

    @property
    def part(self) -> Recording:
        """What is being recorded."""
        return self.parts[-1]

    def begin(self, name: str, inputs: Iterable[torch.Tensor]) -> Recording:
        """Begins a part; for what lies outside the blocks the name is empty."""
        self.part.close()
        found = {s._cdata: s for s in map(storage_of, inputs) if s._cdata not in self.own}
        self.parts.append(Recording(name, inputs=found))
        return self.part

    def drop(self) -> None:
        """Forgets the last part: it is to be recorded anew."""
        self.parts.pop()

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        """Notes a tensor that is kept for backward: a hook on those."""
        storage = storage_of(tensor)
        if not self._paused and storage._cdata not in self.own:
            self.part.save(storage)
        return tensor

    def paused(self, run: Callable[[], Any]) -> Any:
        """Runs something that is not recorded."""
        from torch.utils._python_dispatch import _disable_current_modes

        self._paused = True
        try:
            with _disable_current_modes():
                return run()
        finally:
            self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor made of others, such as one that is spread over ranks: they come here next
        kwargs = kwargs or {}
        if getattr(func, "namespace", "") == "prim":
            return func(*args, **kwargs)  # asks for what a tensor is, and computes nothing
        made, seconds = self._clock(lambda: func(*args, **kwargs), func, args, kwargs)
        for tensor in written_by(func, args, kwargs):
            self._write(storage_of(tensor)._cdata)
        self.part.call(func, args, kwargs, made, seconds)
        self.part.parameters |= self.part.reads.keys() & self.own.keys()
        self._weigh(self.part.calls[-1], tensors_in(args, kwargs))
        return made

    def _weigh(self, call: Call, read: Iterable[torch.Tensor]) -> None:
        if call.touched:
            own = {(s := storage_of(tensor))._cdata: s.nbytes() for tensor in read if tensor.is_floating_point()}
            call.weights = sum(size for key, size in own.items() if key in self.own)

    def _write(self, key: int) -> None:
        if self.part.write(key):
            return
        self.part.writes_inputs |= key in self.part.inputs
        for part in self.parts[:-1]:
            if key in part.outputs:
                part.write(key)


def measured(device: torch.device) -> Clock:
    """Returns a clock that takes the time of each operator on a device."""

    def clock(run: Callable[[], Any], func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        began = time.perf_counter()
        made = run()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        return made, time.perf_counter() - began

    return clock
