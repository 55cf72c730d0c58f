"""What crosses between stages, traced once for each form of micro-batch."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sized
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from paraflow.data.batch import children
from paraflow.pipelining.values import rebuilt, tensors_in

if TYPE_CHECKING:
    from paraflow.pipelining.replay import Replay
    from paraflow.pipelining.trace import Traffic

_MOST = 256

_LABELS = (str, bytes, int, float, np.number)


class Traces:
    """The traces of a model's steps, of which the last few hundred forms of micro-batches are remembered.

    Texts and numbers in a batch (names of files, indices) tell two forms apart where the step looks at them. Whether it
    does is found out by a second trace, in which something stands for them that cannot be looked at.

    Args:
        replay: Traces a step.
        model: The model.
        check: Called with each new trace, and with what calls the step again.
    """

    def __init__(self, replay: Replay, model: nn.Module, check: Callable[[Traffic, Callable[[], Any]], None]) -> None:
        self._replay = replay
        self._parts = tuple(model.modules())
        self._check = check
        self._known: OrderedDict[Hashable, Traffic] = OrderedDict()
        self._ignores: OrderedDict[Hashable, bool] = OrderedDict()

    def of(self, step: Hashable, data: Any, call: Callable[[Any], Any]) -> Traffic:
        """Returns what crosses between the stages when a step is called on a micro-batch.

        Args:
            step: The step's name, or what else tells it from others.
            data: The micro-batch.
            call: Calls the step on a micro-batch, under the precision that it will run in.
        """
        modes = tuple(module.training for module in self._parts)
        situation = (step, torch.is_grad_enabled(), modes)
        form = (*situation, form_of(data, labels=False))
        key = form if self._ignores.get(form, False) else (*situation, form_of(data))
        if key not in self._known:
            traffic = self._replay.trace(lambda: call(data))
            self._check(traffic, lambda: call(data))
            if form not in self._ignores:
                _remember(self._ignores, form, self._ignores_labels(traffic, data, call))
            key = form if self._ignores[form] else key
            _remember(self._known, key, traffic)
        self._known.move_to_end(key)
        return self._known[key]

    def _ignores_labels(self, traffic: Traffic, data: Any, call: Callable[[Any], Any]) -> bool:
        """Whether a step does the same on a batch whose texts and numbers cannot be looked at, and returns none."""
        blind = rebuilt(data, lambda value: value if isinstance(value, bool) else Unread(), _LABELS)
        if blind is data:
            return True
        try:
            found = self._replay.trace(lambda: call(blind))
            same = all(getattr(found, name) == getattr(traffic, name) for name in _COMPARED)
        except (Exception, LookedAt):  # whatever comes of a step that is given what it does not know
            return False
        return same and not tensors_in((found.returned, [event.result for event in found.events]), Unread)


_COMPARED = ("crossing", "slots", "events", "written", "weights", "writes_batch")


def _remember(known: OrderedDict[Hashable, Any], key: Hashable, value: Any) -> None:
    known[key] = value
    if len(known) > _MOST:
        known.popitem(last=False)


class LookedAt(BaseException):
    """An `Unread` was looked at; this goes past handlers of the user's own."""


def _look(self: Unread, *_: object) -> Any:
    raise LookedAt


class Unread:
    """Stands for a value that nothing may depend on: it can be passed on, and any look at it raises."""

    __slots__ = ()


for _name in (
    *("getattr", "eq", "ne", "lt", "le", "gt", "ge", "hash", "bool", "len", "iter", "contains", "getitem", "call"),
    *("str", "repr", "format", "int", "float", "index", "complex", "fspath", "bytes", "reduce_ex"),
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod"),
    *("pow", "rpow", "and", "rand", "or", "ror", "xor", "rxor", "neg", "pos", "abs", "invert", "round", "divmod"),
):
    setattr(Unread, f"__{_name}__", _look)


def form_of(data: Any, *, labels: bool = True) -> Hashable:
    """Returns what two micro-batches have in common that differ only in the values of their tensors and arrays.

    Args:
        data: A micro-batch.
        labels: Whether texts and numbers tell them apart.

    Example:
        >>> form_of((torch.zeros(2, 3), "a")) == form_of((torch.ones(2, 3), "a"))
        True
        >>> form_of((torch.zeros(2, 3), "a")) == form_of((torch.zeros(1, 3), "a"))
        False
        >>> form_of(["a", 1], labels=False) == form_of(["b", 2], labels=False)
        True
    """
    if isinstance(data, torch.Tensor):
        return torch.Tensor, tuple(data.shape), data.dtype, data.requires_grad
    if isinstance(data, np.ndarray):
        return np.ndarray, data.shape, data.dtype
    if isinstance(data, Mapping):
        return type(data), tuple((key, form_of(child, labels=labels)) for key, child in data.items())
    if isinstance(data, (tuple, list)) or (dataclasses.is_dataclass(data) and not isinstance(data, type)):
        return type(data), tuple(form_of(child, labels=labels) for child in children(data))
    if isinstance(data, _LABELS) and not isinstance(data, bool) and not labels:
        return (type(data),)
    if not isinstance(data, Hashable):
        return type(data), len(data) if isinstance(data, Sized) else None
    return type(data), data
