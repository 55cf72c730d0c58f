"""Keeps outputs of chosen operators while a block runs, and gives them back while it runs again.

Torch has the like (`create_selective_checkpoint_contexts`). This one also holds where a kept output is written in place
later, where an operator takes random numbers, where backward runs twice, and where a collective writes its result.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from paraflow.errors import ModelError
from paraflow.recompute.operations import Keeps, is_collective, is_never_run_again, may_be_kept, written_by
from paraflow.recompute.sharding import is_of_sharding

_BETWEEN = ("torch/_dynamo/eval_frame.py", "torch/_compile.py")
"""Torch's frames between whoever calls an operator and a dispatch mode."""

Call = tuple[Any, int]
"""An operator and the place of its call."""


@dataclass
class _Value:
    """A kept tensor, and its version then: one that is written later by what we do not see has another."""

    tensor: torch.Tensor
    version: int
    copied: bool = False

    @property
    def stands(self) -> bool:
        return self.copied or self.tensor._version == self.version

    def copy_before_write(self) -> None:
        self.tensor, self.copied = self.tensor.clone(), True

    def again(self) -> torch.Tensor:
        """Whoever wrote into the original writes into this as well."""
        return self.tensor.clone() if self.copied else _same_memory(self.tensor)


@dataclass
class _Output:
    """What one call of an operator gave."""

    leaves: list[Any]
    spec: Any
    written: list[_Value]
    random: torch.Tensor | None
    device: torch.device | None


@dataclass
class Kept:
    """The outputs that one call of a block keeps.

    Attributes:
        outputs: Each by operator and place.
        read: Those that were asked for when the block ran again.
        missed: Whether one was asked for that is not there, and that may not be run again.
    """

    outputs: dict[Call, _Output] = field(default_factory=dict)
    read: set[Call] = field(default_factory=set)
    missed: bool = False


class Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators and keeps some outputs.

    Args:
        kept: Where they are put.
        keeps: Which, besides those that are always kept.
        unread: Calls whose outputs nothing reads when the block runs again.
    """

    def __init__(self, kept: Kept, keeps: Keeps, unread: set[Call]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._keeps, self._unread = kept, keeps, unread
        self._calls: Counter[int] = Counter()
        self._by_storage: dict[int, list[_Value]] = {}
        self._just_written: list[_Value] = []

    def __exit__(self, *error: Any) -> Any:
        self._settle()
        return super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_wrapped(types):
            return NotImplemented  # its parts come here next
        if self._just_written and _arrives(func):
            return func(*args, **(kwargs or {}))
        self._settle()
        kwargs = kwargs or {}
        if is_collective(func) and is_of_sharding():
            return func(*args, **kwargs)
        written = written_by(func, args, kwargs)
        for tensor in written:
            self._copy_before_write(tensor)
        out = func(*args, **kwargs)
        place = self._calls[id(func)]
        self._calls[id(func)] += 1
        if self._is_kept(func, place, kwargs):
            self._keep((func, place), out, written, kwargs)
        return out

    def _is_kept(self, func: Any, place: int, kwargs: dict[str, Any]) -> bool:
        if is_never_run_again(func, kwargs):
            return True
        return may_be_kept(func) and self._keeps(func, place) and (func, place) not in self._unread

    def _keep(self, call: Call, out: Any, written: list[torch.Tensor], kwargs: dict[str, Any]) -> None:
        leaves, spec = tree_flatten(out)
        places = {tensor.data_ptr(): at for at, tensor in enumerate(written)}
        values: list[Any] = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                values.append(leaf)
            elif leaf.data_ptr() in places:
                values.append(_Written(places[leaf.data_ptr()]))
            else:
                values.append(self._value(leaf))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        draws = torch.Tag.nondeterministic_seeded in getattr(call[0], "tags", ()) and kwargs.get("generator") is None
        device = tensors[0].device if draws and tensors else None
        random = None if device is None else _random_state(device)
        self._just_written = [self._value(tensor) for tensor in written]
        self._kept.outputs[call] = _Output(values, spec, self._just_written, random, device)

    def _settle(self) -> None:
        """An operator that writes counts as a change only once it has returned."""
        for value in self._just_written:
            value.version = value.tensor._version
        self._just_written = []

    def _value(self, tensor: torch.Tensor) -> _Value:
        value = _Value(_same_memory(tensor), tensor._version)
        self._by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(value)
        return value

    def _copy_before_write(self, tensor: torch.Tensor) -> None:
        for value in self._by_storage.pop(tensor.untyped_storage()._cdata, ()):
            value.copy_before_write()


def _arrives(operator: Any) -> bool:
    """Whether a collective's result is put in its place as it is waited for: gloo's reduce-scatter does that."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith(_BETWEEN):
        frame = frame.f_back
    inside = frame is not None and frame.f_code.co_filename == dist.distributed_c10d.__file__
    return inside and not is_collective(operator)


@dataclass(frozen=True)
class _Written:
    """In the place of an output that is one of the tensors written into."""

    at: int


class Replaying(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators again, except those of which there is the output.

    Args:
        name: The block's name in the model.
        kept: The outputs.

    Raises:
        ModelError: The block communicates, chooses or draws, and there is no output of it.
    """

    def __init__(self, name: str, kept: Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name, self._kept = name, kept
        self._counted = {id(operator) for operator, _ in kept.outputs}
        self._calls: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_wrapped(types):
            return NotImplemented
        kwargs = kwargs or {}
        never = is_never_run_again(func, kwargs)
        if not never and id(func) not in self._counted:
            return func(*args, **kwargs)
        if never and is_collective(func) and is_of_sharding():
            return func(*args, **kwargs)
        call = (func, self._calls[id(func)])
        self._calls[id(func)] += 1
        output = self._kept.outputs.get(call)
        if output is None:
            return self._refuse(func) if never else func(*args, **kwargs)
        self._kept.read.add(call)
        if all(value.stands for value in (*output.leaves, *output.written) if isinstance(value, _Value)):
            return _give(output, written_by(func, args, kwargs))
        if is_collective(func) or kwargs.get("generator") is not None:
            raise ModelError(
                f"The result of {func} inside the recomputed block {self._name!r} was written in place after the "
                "block, so it is not there any more for backward, and it cannot be run again. Use an operation that is "
                "not in place."
            )
        return func(*args, **kwargs)

    def _refuse(self, func: Any) -> Any:
        self._kept.missed = True
        raise ModelError(
            f"The block {self._name!r} runs {func} in backward, whose result was not kept: no forward of the block had "
            "done the like before this one, and what communicates, chooses or draws from a generator of its own must "
            "not be run twice. Write activation_checkpointing='selective', which watches every operator, or leave this "
            "block out: activation_checkpointing takes a list of patterns of module names."
        )


def _give(output: _Output, written: list[torch.Tensor]) -> Any:
    for tensor, value in zip(written, output.written, strict=True):
        tensor.copy_(value.tensor)
    if output.random is not None and output.device is not None:
        _set_random_state(output.device, output.random)
    leaves = [
        value.again() if isinstance(value, _Value) else written[value.at] if isinstance(value, _Written) else value
        for value in output.leaves
    ]
    return tree_unflatten(leaves, output.spec)


def _same_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without a graph, with the memory and the version counter of the original."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _is_wrapped(types: Any) -> bool:
    """Whether some argument is made of other tensors, such as one that is spread over ranks."""
    return bool(types) and any(hasattr(kind, "__tensor_flatten__") for kind in types)


def _random_state(device: torch.device) -> torch.Tensor | None:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state() if device.type == "cpu" else None


def _set_random_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
