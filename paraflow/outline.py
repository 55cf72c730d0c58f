"""What the state of a whole model has, where each rank has only the parameters of its own stage."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paraflow.parts import Elsewhere

State = dict[str, Any]
_ATTRIBUTE = "_paraflow_outline"


class Outline:
    """The names, shapes and ties of a model's tensors, noted before other stages' are taken out of it.

    Args:
        module: The whole model; it may be on the meta device.

    Attributes:
        tensors: What stands for each tensor of the module's `state_dict`, by name and in its order.
        units: The names of the modules that each run on one stage, whatever is around them.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
        >>> outline = Outline.of(model)
        >>> model[1].weight = None
        >>> state = outline.with_the_rest({"model": dict(model.state_dict()), "plugins": {}})
        >>> state["model"]["1.weight"]
        Elsewhere(shape=(1, 2), dtype=torch.float32)
        >>> list(outline.without_the_rest(state, model)["model"])
        ['0.weight']
        >>> [tuple(tensor.shape) for tensor in tensors_of_the_whole(model).values()]
        [(2, 2), (1, 2)]
    """

    def __init__(self, module: nn.Module) -> None:
        self.tensors = {name: Elsewhere.like(tensor) for name, tensor in _saved(module).items()}
        firsts: dict[int, str] = {}
        named = [*module.named_parameters(remove_duplicate=False), *_saved(module).items()]
        self.units: tuple[str, ...] = ()
        self._firsts = {name: firsts.setdefault(id(tensor), name) for name, tensor in named}

    @classmethod
    def of(cls, module: nn.Module) -> Outline:
        """Returns the outline of a model, noted now, or by an earlier run before it took other stages' tensors out."""
        outline = outline_of(module)
        if outline is None:
            outline = module.__dict__[_ATTRIBUTE] = cls(module)
        return outline

    def first_name(self, name: str) -> str:
        """Returns what a tensor is called in the whole model: the first of its names, where it is tied."""
        return self._firsts.get(name, name)

    def with_the_rest(self, state: State) -> State:
        """Returns a stage's state as that of the whole: what other stages hold is there as `Elsewhere`.

        A tied tensor of which a stage has one name is there under all of them. What the optimizer keeps has the names
        of the whole model; there is nothing in it of what other stages hold, of which only they know what it is.

        Args:
            state: ``model`` by name, and perhaps ``optimizer``, as the stage's own module names them.
        """
        own = state["model"]
        by_first = {self.first_name(name): value for name, value in own.items()}
        model = {name: by_first.get(self.first_name(name), stands) for name, stands in self.tensors.items()}
        whole = {**state, "model": {**model, **own}}
        if "optimizer" in state:
            whole["optimizer"] = _renamed(state["optimizer"], self._firsts)
        return whole

    def without_the_rest(self, state: State, module: nn.Module) -> State:
        """Returns what a stage takes up of a state of the whole.

        Args:
            state: A whole state, or some of its model's tensors.
            module: The model of which other stages' parameters have been taken out.
        """
        own = module.state_dict(keep_vars=True)
        mine = {**state, "model": {name: value for name, value in state["model"].items() if name in own}}
        if "optimizer" in state:
            names = {self.first_name(name): name for name, _ in module.named_parameters()}
            mine["optimizer"] = _only(_renamed(state["optimizer"], names), set(names.values()))
        return mine


def outline_of(module: nn.Module) -> Outline | None:
    """Returns the outline of the whole, where a module has only the tensors of some stages, else None."""
    outline: Outline | None = module.__dict__.get(_ATTRIBUTE)
    return outline


def tensors_of_the_whole(module: nn.Module) -> Mapping[str, torch.Tensor | Elsewhere]:
    """Returns the tensors that are saved with a model by name, or what stands for them: they have shape and dtype."""
    outline = outline_of(module)
    return _saved(module) if outline is None else outline.tensors


def as_loaded(module: nn.Module, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a module's tensors by name as its `load_state_dict` takes them: as of the layers' present versions.

    Without a version, layers that have changed since add what they once had not, also where it has been taken out.
    """
    state: Any = OrderedDict(tensors)
    state._metadata = getattr(module.state_dict(), "_metadata", None)
    loaded: Mapping[str, Any] = state
    return loaded


def _saved(module: nn.Module) -> dict[str, torch.Tensor]:
    state = module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _renamed(optimizer: Mapping[str, Any], names: Mapping[str, str]) -> State:
    """An optimizer's state by parameter name under other names; what has none keeps its own."""
    groups = [
        {**group, "params": [names.get(name, name) for name in group["params"]]} for group in optimizer["param_groups"]
    ]
    state = {names.get(name, name): values for name, values in optimizer["state"].items()}
    return {**optimizer, "state": state, "param_groups": groups}


def _only(optimizer: Mapping[str, Any], names: set[str]) -> State:
    """What an optimizer's state by parameter name has of some parameters."""
    groups = [
        {**group, "params": [name for name in group["params"] if name in names]} for group in optimizer["param_groups"]
    ]
    state = {name: values for name, values in optimizer["state"].items() if name in names}
    return {**optimizer, "state": state, "param_groups": groups}
