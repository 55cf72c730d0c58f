"""First values from the layers' own ``reset_parameters``, for a model that was built on the meta device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from paraflow import seeding
from paraflow.births import Birth
from paraflow.errors import ModelError
from paraflow.parts import Box
from paraflow.recording import RandomState

_REMEDY = "Build the model inside `with pf.deferred_init():` instead, which needs nothing from the layer."


def resets_of(module: nn.Module, names: Collection[str]) -> Mapping[str, Birth]:
    """Returns the first values of parameters and buffers, as their layers set them.

    Layers are reset one after another in the order of registration, so that a model whose layers are built in that
    order, and not changed afterwards, starts as if it had been built on the host after the same `pf.seed`. No more
    than one layer has memory at a time. What the layers are is remembered here: the module may be changed.

    Args:
        module: The module.
        names: Those of the tensors, in the module.

    Raises:
        ModelError: Whose first values the layers do not set.
    """
    shells = dict(_shell(module, {}).named_modules())
    _refuse_initialisers(shells)
    wanted = {id(t) for name, shell in shells.items() for key, t in _own(shell).items() if _join(name, key) in names}
    layers = {name: shell for name, shell in shells.items() if any(id(t) in wanted for t in _own(shell).values())}
    for name, layer in layers.items():
        _require_reset(name, layer, wanted)
    _refuse_tied(layers)
    versions = {
        _join(name, key): t._version
        for name, layer in layers.items()
        for key, t in layer._parameters.items()
        if t is not None
    }
    for shell in shells.values():
        _let_go(shell)
    order = _Order(layers, versions)
    return {name: _Reset(order, name) for name in names}


class _Reset(Birth):
    """A tensor of a layer that is reset in its turn."""

    def __init__(self, order: _Order, name: str) -> None:
        self._order = order
        self._name = name

    def part(self, box: Box) -> torch.Tensor:
        return self._order.value(self._name)[box]


class _Order:
    """Layers that are reset one after another; the tensors of the last one are kept.

    Args:
        layers: By name, in the order in which they are reset.
        versions: How often each parameter had been changed when the model was built.
    """

    def __init__(self, layers: Mapping[str, nn.Module], versions: Mapping[str, int]) -> None:
        self._versions = versions
        self._layers = list(layers.items())
        self._places = {_join(name, key): at for at, (name, shell) in enumerate(self._layers) for key in _own(shell)}
        self._seed = seeding.chosen()
        self._restart()

    def _restart(self) -> None:
        generator = torch.default_generator
        self._random = RandomState(generator, torch.Generator().manual_seed(self._seed).get_state())
        self._done = 0
        self._values: dict[str, torch.Tensor] = {}

    def value(self, name: str) -> torch.Tensor:
        place = self._places[name]
        if place < self._done - 1:
            self._restart()
        while self._done <= place:
            self._values = {}
            self._values = self._reset(*self._layers[self._done])
            self._done += 1
        return self._values[name]

    def _reset(self, name: str, shell: nn.Module) -> dict[str, torch.Tensor]:
        """A layer's tensors after its reset; the layer itself is left without memory."""
        layer = _with_blanks(shell)
        before = {key: tensor._version for key, tensor in _own(layer).items()}
        with self._random.again(), torch.device("cpu"), torch.no_grad():
            for method in ("reset_parameters", "reset_buffers"):
                if hasattr(layer, method):
                    getattr(layer, method)()
            self._random = RandomState.of(torch.default_generator)
        values = _own(layer)
        for key, value in values.items():
            writes = value._version - before[key]
            if not writes and (not value.is_floating_point() or bool(value.isnan().any())):
                raise ModelError(
                    f"{_join(name, key)} is on the meta device, and {_named(layer)} does not set it. {_REMEDY}"
                )
            if self._versions.get(_join(name, key), writes) != writes:
                raise ModelError(
                    f"{_join(name, key)} was changed on the meta device after, or without, {_named(layer)}: there it "
                    f"does nothing. {_REMEDY}"
                )
        return {_join(name, key): value.detach() for key, value in values.items()}


def _shell(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    """A module like another, with the same tensors, that stays as it is when the other is changed."""
    if id(module) not in made:
        shell = made[id(module)] = module.__class__.__new__(module.__class__)
        shell.__dict__.update(module.__dict__)
        shell._parameters, shell._buffers = dict(module._parameters), dict(module._buffers)
        shell._modules = {key: child and _shell(child, made) for key, child in module._modules.items()}
    return made[id(module)]


def _let_go(shell: nn.Module) -> None:
    """Has a shell hold tensors of its own: the model's will have values, which a layer may not reset."""
    for key, parameter in shell._parameters.items():
        if parameter is not None:
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            shell._parameters[key] = nn.Parameter(empty, parameter.requires_grad)
    for key, buffer in shell._buffers.items():
        if buffer is not None:
            shell._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")


def _with_blanks(shell: nn.Module) -> nn.Module:
    """A layer with memory in which nothing is set yet."""
    layer = shell.__class__.__new__(shell.__class__)
    layer.__dict__.update(shell.__dict__)
    layer._parameters = {
        key: None if value is None else nn.Parameter(_blank(value), value.requires_grad)
        for key, value in shell._parameters.items()
    }
    layer._buffers = {key: None if value is None else _blank(value) for key, value in shell._buffers.items()}
    return layer


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    unset = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.full(tensor.shape, unset, dtype=tensor.dtype, device="cpu")


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers that a module holds itself."""
    both: dict[str, Any] = {**module._parameters, **module._buffers}
    return {key: tensor for key, tensor in both.items() if tensor is not None}


def _refuse_initialisers(shells: Mapping[str, nn.Module]) -> None:
    for shell in shells.values():
        for method in ("_init_weights", "init_weights"):
            if hasattr(shell, method):
                raise ModelError(
                    f"{type(shell).__name__} has {method}, which does nothing to weights on the meta device. {_REMEDY}"
                )


def _require_reset(name: str, layer: nn.Module, wanted: Collection[int]) -> None:
    keys = [key for key, tensor in _own(layer).items() if id(tensor) in wanted]
    only_buffers = all(key in layer._buffers for key in keys)
    if hasattr(layer, "reset_parameters") or (only_buffers and hasattr(layer, "reset_buffers")):
        return
    raise ModelError(
        f"{_join(name, keys[0])} is on the meta device, and its values are not known: {type(layer).__name__} has no "
        f"reset_parameters{' or reset_buffers' if only_buffers else ''}. {_REMEDY}"
    )


def _refuse_tied(layers: Mapping[str, nn.Module]) -> None:
    """Which of two different layers set a shared weight cannot be seen any more."""
    first: dict[int, tuple[str, nn.Module]] = {}
    for name, layer in layers.items():
        for key, tensor in _own(layer).items():
            other_name, other = first.setdefault(id(tensor), (_join(name, key), layer))
            if type(other) is not type(layer):
                raise ModelError(
                    f"{other_name} and {_join(name, key)} are one weight of two kinds of layer, on the meta device: "
                    f"which of the two set it cannot be seen. {_REMEDY}"
                )


def _named(layer: nn.Module) -> str:
    return f"{type(layer).__name__}.reset_parameters"


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
