"""What a run of modules may write besides its outputs: attributes, buffers, lists, and what hooks on them keep."""

from __future__ import annotations

import copy
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from paraflow.parts import local

_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
_NEVER = frozenset([*nn.Module().__dict__, "_compiled_call_impl", "forward"])
_NOT_THEIRS = frozenset(["torch", "paraflow", *sys.stdlib_module_names])
_DEEPEST = 4


class Traces:
    """Modules as they are at a moment, so that what a run writes can be put back.

    Attributes and buffers become the same objects again; lists, dictionaries and sets, and plain objects, have again
    what was in them; tensors have their values again, and as many writes are counted as before where nothing was
    written. Hooks of others run with the modules, since a forward may need what they change or keep; what they keep
    is put back as well.

    Args:
        module: The module; those inside are remembered too.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> net.seen, net.calls = [1], 0
        >>> traces = Traces(net)
        >>> net.seen.append(2)
        >>> net.calls += 1
        >>> traces.put_back()
        >>> net.seen, net.calls
        ([1], 0)
    """

    def __init__(self, module: nn.Module) -> None:
        self._seen: dict[int, Any] = {}
        self._names: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._contents: list[tuple[Any, Any]] = []
        for inner in module.modules():
            self._note(inner, 0)
            for hook in (*inner._forward_hooks.values(), *inner._forward_pre_hooks.values()):
                self._note_hook(hook)

    def put_back(self) -> None:
        """Puts back what has been written since."""
        for names, before in self._names:
            for name in [name for name in names if name not in before and _is_written(name)]:
                del names[name]
            names.update({name: value for name, value in before.items() if names.get(name, names) is not value})
        for cell, value in self._cells:
            cell.cell_contents = value
        for value, before in self._contents:
            _refill(value, before)

    def _note(self, value: Any, depth: int) -> None:
        if id(value) in self._seen or depth > _DEEPEST:
            return
        if isinstance(value, torch.Tensor):
            self._note_tensor(value)
        elif isinstance(value, torch.Generator):
            self._seen[id(value)] = value
            self._contents.append((value, value.get_state()))
        elif type(value) in _CONTAINERS or type(value) is tuple:
            self._seen[id(value)] = value
            if type(value) is not tuple:
                self._contents.append((value, copy.copy(value)))
            for inner in list(value.values()) if isinstance(value, dict) else list(value):
                self._note(inner, depth + 1)
        elif isinstance(value, nn.Module):
            self._seen[id(value)] = value
            self._note_names(value.__dict__, depth)
            self._note_names(value._buffers, depth)
        elif _is_plain(value):
            self._seen[id(value)] = value
            self._note_names(vars(value), depth)

    def _note_names(self, names: dict[str, Any], depth: int) -> None:
        before = {name: value for name, value in names.items() if _is_written(name)}
        self._names.append((names, before))
        for value in before.values():
            self._note(value, depth + 1)

    def _note_tensor(self, tensor: torch.Tensor) -> None:
        held = local(tensor)
        if isinstance(tensor, nn.Parameter) or type(held) is not torch.Tensor:
            return  # what is learned, no forward writes
        if held.is_meta or held.is_inference() or held.layout != torch.strided:
            return
        self._seen[id(tensor)] = tensor
        self._contents.append((held, held.detach().clone()))

    def _note_hook(self, hook: Any) -> None:
        if isinstance(hook, partial):
            self._note_hook(hook.func)
            self._note((hook.args, hook.keywords), 0)
        elif isinstance(hook, MethodType):
            self._note_hook(hook.__func__)
            if _is_of_others(type(hook.__self__)):
                self._note_holder(hook.__self__)
        elif isinstance(hook, FunctionType):
            if _is_of_others(hook):
                self._note_function(hook)
        elif _is_of_others(type(hook)):
            self._note_holder(hook)

    def _note_holder(self, holder: Any) -> None:
        """Of an object with a hook; it may be called, unlike what modules keep."""
        if isinstance(holder, nn.Module):
            self._note(holder, 0)
        elif hasattr(holder, "__dict__") and id(holder) not in self._seen:
            self._seen[id(holder)] = holder
            self._note_names(vars(holder), 0)

    def _note_function(self, function: FunctionType) -> None:
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # it is not filled yet
                continue
            self._cells.append((cell, value))
            self._note(value, 0)
        for value in function.__defaults__ or ():
            self._note(value, 0)
        for name in function.__code__.co_names:
            if type(value := function.__globals__.get(name)) in _CONTAINERS:
                self._note(value, 0)


def _refill(value: Any, before: Any) -> None:
    """Only where something differs: a tensor that is kept for a backward must not be written to."""
    if isinstance(value, torch.Tensor):
        if not torch.equal(value, before):
            value.data.copy_(before)
    elif isinstance(value, torch.Generator):
        value.set_state(before)
    elif not _same(value, before):
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(before)


def _same(now: Any, before: Any) -> bool:
    pairs = zip(_items(now), _items(before), strict=False)
    return len(now) == len(before) and all(one is other for one, other in pairs)


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
    else:
        yield from value


def _is_written(name: str) -> bool:
    return name not in _NEVER and not name.startswith("_paraflow")


def _is_plain(value: Any) -> bool:
    """Whether a value is a plain object of the user's, or of a library of models."""
    return hasattr(value, "__dict__") and not callable(value) and _is_of_others(type(value))


def _is_of_others(value: Any) -> bool:
    """Whether a class or a function is none of Python's, torch's or ours, whose state is no trace."""
    return str(getattr(value, "__module__", "")).partition(".")[0] not in _NOT_THEIRS
