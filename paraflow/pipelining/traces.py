"""What crosses between stages, traced once for each form of micro-batch."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paraflow.data.batch import children

if TYPE_CHECKING:
    from paraflow.pipelining.replay import Replay
    from paraflow.pipelining.trace import Traffic

_MOST = 256


class Traces:
    """The traces of a model's steps, of which the last few hundred forms of micro-batches are remembered.

    Args:
        replay: Traces a step.
        model: The model.
        check: Called with each new trace.
    """

    def __init__(self, replay: Replay, model: nn.Module, check: Callable[[Traffic], None]) -> None:
        self._replay = replay
        self._parts = tuple(model.modules())
        self._check = check
        self._known: OrderedDict[Hashable, Traffic] = OrderedDict()

    def of(self, step: str, data: Any, call: Callable[[], Any]) -> Traffic:
        """Returns what crosses between the stages when a step is called on a micro-batch.

        Args:
            step: The step's name.
            data: The micro-batch.
            call: Calls the step on it, under the precision that it will run in.
        """
        modes = tuple(module.training for module in self._parts)
        key = (step, form_of(data), torch.is_grad_enabled(), modes)
        if key not in self._known:
            traffic = self._replay.trace(call)
            self._check(traffic)
            self._known[key] = traffic
            if len(self._known) > _MOST:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]


def form_of(data: Any) -> Hashable:
    """Returns what two micro-batches have in common that differ only in the values of their tensors.

    Example:
        >>> form_of((torch.zeros(2, 3), "a")) == form_of((torch.ones(2, 3), "a"))
        True
        >>> form_of((torch.zeros(2, 3), "a")) == form_of((torch.zeros(1, 3), "a"))
        False
    """
    if isinstance(data, torch.Tensor):
        return torch.Tensor, tuple(data.shape), data.dtype, data.requires_grad
    if isinstance(data, Mapping):
        return type(data), tuple((key, form_of(child)) for key, child in data.items())
    if isinstance(data, (tuple, list)) or (dataclasses.is_dataclass(data) and not isinstance(data, type)):
        return type(data), tuple(map(form_of, children(data)))
    return (type(data), data if isinstance(data, Hashable) else None)
