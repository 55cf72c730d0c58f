"""A model's units without memory: they say what a unit returns for what it is given, and nothing is computed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paraflow.errors import ModelError
from paraflow.pipelining.absent import Slot, slot_of
from paraflow.pipelining.values import rebuilt, tensors_in


class Skeleton:
    """Copies of a model's units whose tensors have no memory.

    Args:
        model: The model, before its parameters are taken away or changed.
        units: The names of its units.
        device: The device that it runs on.

    Attributes:
        device: The device that the model runs on.
        mode: torch's mode in which the copies are run.
        weights: What each parameter, and each buffer of a unit, is like, by its first name.
        owners: The modules that hold each of them: name, the name of the unit it is in (None: in none), attribute.

    Raises:
        ModelError: A unit cannot be copied.
    """

    def __init__(self, model: nn.Module, units: Sequence[str], device: torch.device) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.weights: dict[str, Slot] = {}
        self.owners: dict[str, list[tuple[str, str | None, str]]] = {}
        self._model = model
        self.device = device
        self._fakes: dict[str, Tensor] = {}
        names = self._name_weights(model, units)
        memo: dict[int, Any] = {}
        for tensor, name in names:
            memo[id(tensor)] = self._fakes[name] = self._fake(tensor)
        originals = {name: model.get_submodule(name) for name in units}
        try:
            with _CopiesWithoutMemory(self._fake):
                self._units = copy.deepcopy(originals, memo)
        except (TypeError, RuntimeError) as error:
            raise ModelError(
                f"A layer of {type(model).__name__} cannot be copied by copy.deepcopy, as a pipeline needs to see what "
                f"layers return without running them: {error}"
            ) from error
        for module in (module for unit in self._units.values() for module in unit.modules()):
            module._forward_hooks.clear()  # they look at values, or collect them

    def _name_weights(self, model: nn.Module, units: Sequence[str]) -> list[tuple[Tensor, str]]:
        first: dict[int, str] = {}
        found: list[tuple[Tensor, str]] = []
        for path, module in model.named_modules():
            unit = next((name for name in units if path == name or path.startswith(f"{name}.")), None)
            held: dict[str, Tensor | None] = {**module._parameters}
            if unit is not None:
                held |= module._buffers
            for leaf, tensor in held.items():
                if tensor is None:
                    continue
                name = first.setdefault(id(tensor), f"{path}.{leaf}" if path else leaf)
                self.owners.setdefault(name, []).append((path, unit, leaf))
                if name not in self.weights:
                    self.weights[name] = slot_of(tensor, name, self.device)
                    found.append((tensor, name))
        return found

    def _fake(self, tensor: Tensor) -> Tensor:
        from torch._subclasses.fake_tensor import is_fake

        if is_fake(tensor):
            return tensor
        with self.mode, torch.no_grad():
            fake = torch.empty_strided(
                tuple(tensor.shape), tuple(tensor.stride()), dtype=tensor.dtype, device=self.device
            )
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)

    def weight(self, name: str) -> Tensor:
        """Returns what stands for a parameter or a buffer, by its first name."""
        return self._fakes[name]

    def take_modes(self) -> None:
        """Puts the copies in the modes, training or evaluation, in which the units are."""
        for name, unit in self._units.items():
            training = {path: module.training for path, module in self._model.get_submodule(name).named_modules()}
            for path, module in unit.named_modules():
                module.training = training.get(path, module.training)

    def unit(self, name: str) -> Callable[..., Any]:
        """Returns a function that gives what a unit returns for tensors of this skeleton's mode."""
        return lambda *args, **kwargs: self._call(name, args, kwargs)

    def _call(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        from torch._subclasses import fake_tensor

        unknowable = (
            fake_tensor.DataDependentOutputException,
            fake_tensor.DynamicOutputShapeException,
            fake_tensor.UnsupportedOperatorException,
            fake_tensor.UnsupportedFakeTensorException,
        )
        try:
            with self.mode:
                return self._units[name](*args, **kwargs)
        except unknowable:
            return self._run_on_zeros(self._units[name], args, kwargs)

    def _run_on_zeros(self, unit: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What a unit returns that looks at values: run once for real, with zeros for all that has no values."""

        def zeros(tensor: Tensor) -> Tensor:
            return torch.zeros(tuple(tensor.shape), dtype=tensor.dtype, device=self.device)

        held = {**dict(unit.named_parameters()), **dict(unit.named_buffers())}
        given = tensors_in((args, kwargs))
        flows = torch.is_grad_enabled() and any(t.requires_grad for t in (*held.values(), *given))
        with torch.no_grad():
            state = {name: zeros(tensor) for name, tensor in held.items()}
            result = torch.func.functional_call(unit, state, rebuilt(args, zeros), rebuilt(dict(kwargs), zeros))

        def fake(tensor: Tensor) -> Tensor:
            return self._fake(tensor).requires_grad_(flows and tensor.is_floating_point())

        return rebuilt(result, fake)


class _CopiesWithoutMemory(TorchFunctionMode):
    """Has copies of tensors made without memory."""

    def __init__(self, fake: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._fake = fake

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = cast("tuple[Tensor, dict[int, Any]]", tuple(args))
        if id(tensor) not in memo:
            memo[id(tensor)] = self._fake(tensor)
        return memo[id(tensor)]
