"""The units of a model: submodules whose parameters are gathered, used and let go of together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from torch import nn

from paraflow.errors import ModelError, some_of
from paraflow.parts import is_spread
from paraflow.plan import DATA_DEGREES

Asked = Sequence[str | type[nn.Module]]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_REPEATING = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_USED_ELSEWHERE = (nn.Embedding, nn.EmbeddingBag)
_SMALLEST_SHARE = 1 / 32


@dataclass(frozen=True)
class Unit:
    """A submodule whose parameters are sharded and gathered together.

    Attributes:
        name: Its name in the model; ``""`` is what no other unit holds.
        bytes: The bytes of its parameters, without those of units inside it.
        module: The submodule.
    """

    name: str
    bytes: int
    module: nn.Module


def find_units(model: nn.Module, asked: Asked | None = None) -> list[Unit]:
    """Returns the units of a model, in its order; what is left belongs to the whole, which is no unit of the list.

    Without a choice these are the repeated blocks (children of one class in a ModuleList, ModuleDict or Sequential),
    and of the rest each layer that holds a large share of the bytes. Embeddings are left to the whole: their weight is
    often used outside of their forward. So is a module that shares a parameter with another outside of it: tied weights
    stay in one unit.

    Args:
        model: The user's module; it may be on the meta device.
        asked: Module classes, names, or patterns of names in which ``*`` stands for one part (``"blocks.*"``); an empty
            list asks for no units. None takes the model's attribute ``fsdp_units`` if it has one.

    Raises:
        ModelError: What was asked for matches nothing, has no forward, or shares a parameter with what is outside; or
            a parameter is a single number without a dimension; or an embedding makes sparse gradients.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> [unit.name for unit in find_units(model)]
        ['0', '2']
        >>> [unit.name for unit in find_units(model, ["2"])]
        ['2']
    """
    _require_no_scalars(model)
    _require_no_sparse(model)
    if asked is None:
        asked = getattr(model, "fsdp_units", None)
    chosen = _automatic(model) if asked is None else _asked_for(model, asked)
    for name, module in chosen.items():
        _require_one_dtype(name, module.parameters())
    return [Unit(name, _own_bytes(module, chosen.values()), module) for name, module in chosen.items()]


def rest_of(model: nn.Module, units: Sequence[Unit]) -> Unit:
    """Returns what no unit holds, as a unit called ``""``."""
    inside = {id(parameter) for unit in units for parameter in unit.module.parameters()}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    _require_one_dtype("", rest)
    return Unit("", sum(map(bytes_gathered, rest)), model)


def _automatic(model: nn.Module) -> dict[str, nn.Module]:
    smallest = sum(parameter.nbytes for parameter in model.parameters()) * _SMALLEST_SHARE
    owners = _owners(model)
    found: dict[str, nn.Module] = {}

    def visit(name: str, module: nn.Module) -> None:
        repeated = _repeated(module)
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            layer = _is_layer(child)
            if not runs(child):
                visit(path, child)
                continue
            large = layer and sum(parameter.nbytes for parameter in child.parameters()) >= smallest
            block = not layer and _class_of(child) in repeated
            if (large or block) and not isinstance(child, _USED_ELSEWHERE) and not _shared(child, owners):
                found[path] = child
            elif not layer:
                visit(path, child)

    if not _is_layer(model):
        visit("", model)
    return found


def _repeated(module: nn.Module) -> set[type]:
    """The classes of which a container holds several."""
    if not isinstance(module, _REPEATING):
        return set()
    # Not children(), which leaves out a block that is there twice.
    counts = Counter(
        _class_of(child) for child in module._modules.values() if child is not None and _had_parameters(child)
    )
    return {kind for kind, count in counts.items() if count > 1}


def _is_layer(module: nn.Module) -> bool:
    """Whether a module is used as one: no part of it runs by itself, or it uses the weights of its parts directly."""
    whole = isinstance(module, nn.MultiheadAttention) or hasattr(module, "parametrizations")
    return whole or not any(_has_parameters(child) for child in module.children())


def runs(module: nn.Module) -> bool:
    """Returns whether a module has a forward of its own; one that is never called gathers nothing."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _class_of(module: nn.Module) -> type:
    """A module's own class: ``fully_shard`` gives a unit another, but none to what has no parameters on this rank."""
    return type(module).__mro__[2] if hasattr(module, "_get_fsdp_state") else type(module)


def _had_parameters(module: nn.Module) -> bool:
    """Whether there is a place for parameters: those of other stages have been taken out of theirs."""
    return any(part._parameters for part in module.modules())


def _owners(model: nn.Module) -> dict[int, set[int]]:
    """The modules that have a parameter as their own, by the parameter."""
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), set()).add(id(module))
    return owners


def _shared(module: nn.Module, owners: dict[int, set[int]]) -> bool:
    """Whether a parameter inside a module belongs to a module outside of it, too."""
    inside = {id(part) for part in module.modules()}
    return any(not owners[id(parameter)] <= inside for parameter in module.parameters())


def _asked_for(model: nn.Module, asked: Asked) -> dict[str, nn.Module]:
    if isinstance(asked, (str, type)):
        asked = [asked]
    named = {name: module for name, module in model.named_modules() if name}
    wanted: set[str] = set()
    for one in asked:
        wanted.update(_matches(model, named, one))
    chosen = {name: named[name] for name in named if name in wanted and _has_parameters(named[name])}
    owners = _owners(model)
    for name, module in chosen.items():
        _require_unit(name, module, owners)
    return chosen


def _matches(model: nn.Module, named: dict[str, nn.Module], one: str | type[nn.Module]) -> list[str]:
    if isinstance(one, str):
        found = [name for name in named if _fits(name, one)]
    elif isinstance(one, type) and issubclass(one, nn.Module):
        found = [name for name, module in named.items() if isinstance(module, one)]
    else:
        raise ModelError(f"A unit is a module class or a pattern of module names, not {one!r}.")
    if not found:
        said = one if isinstance(one, str) else one.__name__
        raise ModelError(
            f"No module of {type(model).__name__} matches the unit {said!r}; there are "
            f"{_told(named)}. '*' stands for one part of a name."
        )
    return found


def _fits(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _told(named: dict[str, nn.Module]) -> str:
    names = [f"{name} ({type(module).__name__})" for name, module in named.items() if _has_parameters(module)]
    return some_of(names, most=12)


def _require_unit(name: str, module: nn.Module, owners: dict[int, set[int]]) -> None:
    if not runs(module):
        remedy = f"write units=['{name}.*']" if isinstance(module, _CONTAINERS) else "leave it out"
        raise ModelError(f"{name} is a {type(module).__name__}, which has no forward; {remedy}.")
    if _shared(module, owners):
        raise ModelError(
            f"{name} shares a parameter with a module outside of it, and tied weights must be in one unit. Name a "
            "module that holds both, or leave it out: what no unit holds is sharded with the whole."
        )


def _require_no_scalars(model: nn.Module) -> None:
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise ModelError(
            f"{', '.join(scalars[:5])} of {type(model).__name__}: a parameter of no dimension cannot be sharded. "
            "Give it one: nn.Parameter(torch.zeros(1)) in place of nn.Parameter(torch.zeros(()))."
        )


def _require_no_sparse(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        if isinstance(layer, _USED_ELSEWHERE) and layer.sparse and layer.weight.requires_grad:
            kind = type(layer).__name__
            raise ModelError(
                f"{name or kind} was made with sparse=True, and sparse gradients cannot be sharded. Write "
                f"nn.{kind}(..., sparse=False), or use dp= in place of fsdp=."
            )


def _require_one_dtype(name: str, parameters: Iterable[nn.Parameter]) -> None:
    dtypes = {parameter.dtype for parameter in parameters if parameter.requires_grad}
    if len(dtypes) > 1:
        where = f"The unit {name}" if name else "What no unit holds"
        raise ModelError(
            f"{where} has parameters of {', '.join(sorted(map(str, dtypes)))}, which cannot be sharded together. "
            "Convert the model to one dtype, or name units that hold one dtype each: FSDP(units=[...])."
        )


def _own_bytes(module: nn.Module, units: Iterable[nn.Module]) -> int:
    parts = {id(part) for part in module.modules()} - {id(module)}
    inner = {id(parameter) for unit in units if id(unit) in parts for parameter in unit.parameters()}
    return sum(bytes_gathered(parameter) for parameter in module.parameters() if id(parameter) not in inner)


def bytes_gathered(parameter: nn.Parameter) -> int:
    """Returns the bytes of a parameter when sharding has gathered it: of one that is split besides, of a part.

    Example:
        >>> bytes_gathered(nn.Linear(3, 1).weight)
        12
    """
    if not is_spread(parameter):
        return parameter.nbytes
    layout: Any = parameter
    names, sizes = layout.device_mesh.mesh_dim_names or (), layout.device_mesh.shape
    dims = zip(names, sizes, layout.placements, strict=False)
    parts: int = prod(size for name, size, kind in dims if name not in DATA_DEGREES and hasattr(kind, "dim"))
    return -(-parameter.nbytes // parts)
