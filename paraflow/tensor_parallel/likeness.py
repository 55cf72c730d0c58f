"""A module as it was before its layers were split: run beside the split one, it shows whether the two agree."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn

from paraflow.parts import whole
from paraflow.tensor_parallel.traces import Traces

_HELD = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
_ALWAYS = "_forward_hooks_always_called"


@dataclass
class Likeness:
    """Remembers what a split changes of a module, so that the module can be made again as it was.

    It keeps no parameters: these are joined when they are wanted. Modules inside that have none of the split layers are
    the live ones.

    Args:
        owner: The module, before it is split.
        layers: The paths, inside it, of the layers that will be split.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> before = Likeness(net, ["0"])
        >>> net[0].forward = lambda x: x
        >>> before.changed()
        >>> before.made()[0] is net[0], "forward" in vars(before.made()[0]), before.made()[1] is net[1]
        (False, False, True)
    """

    owner: nn.Module
    layers: Collection[str]
    _before: dict[str, tuple[type[nn.Module], dict[str, Any]]] = field(default_factory=dict)
    _undone: dict[str, dict[str, Any]] = field(default_factory=dict)
    _added: dict[str, set[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        paths = {""} | {".".join(parts[:n]) for parts in _parts(self.layers) for n in range(1, len(parts) + 1)}
        for path in sorted(paths):
            module = self.owner.get_submodule(path)
            kept = {name: value for name, value in vars(module).items() if name not in _HELD}
            hooks = {name: copy.copy(kept[name]) for name in (*_HOOKS, _ALWAYS)}
            self._before[path] = type(module), {**kept, **hooks}

    def changed(self) -> None:
        """Notes what the split has changed; attributes that are set later are those of the live module."""
        for path, (_, before) in self._before.items():
            now = vars(self.owner.get_submodule(path))
            self._added[path] = {name for name in now if name not in before and name not in _HELD}
            self._undone[path] = {name: value for name, value in before.items() if now.get(name) is not value}

    def made(self) -> nn.Module:
        """Returns the module with whole layers, in evaluation mode: a collective where parameters are divided."""
        return self._made("", self.owner, {})

    def _made(self, path: str, live: nn.Module, joined: dict[int, torch.Tensor]) -> nn.Module:
        kind, before = self._before[path]
        made = kind.__new__(kind)
        unknown = self._added[path] | {name for name in ("forward", "_compiled_call_impl") if name not in before}
        attributes = {name: value for name, value in vars(live).items() if name not in unknown}
        attributes.update({**self._undone[path], "training": False})
        if isinstance(forward := attributes.get("forward"), MethodType) and forward.__self__ is live:
            attributes["forward"] = MethodType(forward.__func__, made)
        held = {name: parameter for name, parameter in live._parameters.items() if parameter is not None}
        for parameter in held.values():
            if id(parameter) not in joined:
                joined[id(parameter)] = _joined(parameter)
        parameters = {name: joined[id(held[name])] if name in held else None for name in live._parameters}
        attributes.update(_parameters=parameters, _buffers=dict(live._buffers), _modules=dict(live._modules))
        made.__dict__.update(attributes)
        for name, inner in live._modules.items():
            within = f"{path}.{name}" if path else name
            if inner is not None and within in self._before:
                made._modules[name] = self._made(within, inner, joined)
        return made

    def run_split(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the live module's own forward, without what has been put around it since."""
        kind, before = self._before[""]
        own = before.get("forward")
        return own(*args, **kwargs) if own is not None else kind.forward(self.owner, *args, **kwargs)


def _joined(parameter: torch.Tensor) -> torch.Tensor:
    return whole(parameter.detach()).requires_grad_(parameter.requires_grad)


def _parts(paths: Collection[str]) -> Iterator[list[str]]:
    for path in paths:
        if path:
            yield path.split(".")


def copies(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """Returns arguments that may be written to: tensors with graphs and memory of their own, caches too.

    Returns:
        The arguments, and the leaves that those tensors come from which require gradients.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> ((first, second), same), leaves = copies(((x * 2, x), x))
        >>> len(leaves), second is same, second is x
        (2, True, False)
    """
    memo: dict[int, Any] = {}
    leaves: list[torch.Tensor] = []
    _note(value, memo, set(), leaves)
    try:
        return copy.deepcopy(value, memo), leaves
    except Exception:  # what cannot be copied is used as it is; its tensors are copied
        from torch.utils._pytree import tree_map

        return tree_map(lambda leaf: memo.get(id(leaf), leaf), value), leaves


def _note(value: Any, memo: dict[int, Any], seen: set[int], leaves: list[torch.Tensor]) -> None:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        copied = value.detach().clone()
        if value.requires_grad:
            leaves.append(copied.requires_grad_())
            copied = copied.clone()  # which may be written to
        memo[id(value)] = copied
    elif isinstance(value, nn.Module):
        memo[id(value)] = value
    elif isinstance(value, (list, tuple, set, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            _note(inner, memo, seen, leaves)
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        _note(vars(value), memo, seen, leaves)


@contextmanager
def evaluated(module: nn.Module) -> Iterator[None]:
    """Runs a block with a module in evaluation mode; what it is and keeps is put back, however the block ends."""
    modes = [(inner, inner.training) for inner in module.modules()]
    traces = Traces(module)
    for inner, _ in modes:
        inner.__dict__["training"] = False
    try:
        yield
    finally:
        for inner, mode in modes:
            inner.__dict__["training"] = mode
        traces.put_back()
