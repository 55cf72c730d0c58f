"""Finds the blocks of a model: what is repeated in it, or what the user names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

_LISTS = (nn.ModuleList, nn.ModuleDict)


def repeated_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Returns the blocks that a model repeats, by name, in order.

    A block is a child of a `ModuleList`, `ModuleDict` or `Sequential` that holds several of its class (for a
    `Sequential`: of the same content). Where repeats are nested, the outermost count; single layers of torch do not. A
    model that repeats nothing is divided into its direct children with parameters.

    Args:
        module: The model.

    Example:
        >>> def layer(): return nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> list(repeated_blocks(nn.ModuleDict({"stem": nn.Linear(2, 2), "body": nn.Sequential(layer(), layer())})))
        ['body.0', 'body.1']
    """
    found = {block: name for name, block in reversed(list(_repeats(module, "")))}  # a shared block has its first name
    return {name: block for block, name in reversed(found.items())} or {
        name: child
        for name, child in module.named_children()
        if not isinstance(child, _LISTS) and _had_parameters(child)
    }


def matching_blocks(module: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Returns the modules whose names match a pattern of `fnmatch`, by name; of nested ones the outermost.

    A list of modules, which is never called itself, stands for what is in it.

    Args:
        module: The model.
        patterns: Such as ``"blocks.*"``; a ``*`` also matches dots.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
        >>> list(matching_blocks(net, ["1*"]))
        ['1']
    """
    found: dict[str, nn.Module] = {}
    for name, child in module.named_modules():
        parents = {name[:at] for at, letter in enumerate(name) if letter == "."}
        if not name or not found.keys().isdisjoint(parents):
            continue
        listed = isinstance(child, _LISTS)
        if not listed and any(
            fnmatchcase(each, pattern) for pattern in patterns for each in _callable_names(module, name)
        ):
            found[name] = child
    return found


def within_units(module: nn.Module, blocks: Mapping[str, nn.Module], units: Sequence[str]) -> dict[str, nn.Module]:
    """Returns blocks of which none reaches over units that are on stages of their own: such a one is taken apart.

    Args:
        module: The model.
        blocks: Some of its modules, by name.
        units: The names of the units of all stages; empty where there are no stages.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        >>> list(within_units(net, dict(net.named_children()), ["0", "1.0", "1.1"]))
        ['0', '1.0', '1.1']
    """
    found: dict[str, nn.Module] = {}
    for name, block in blocks.items():
        inside = [unit for unit in units if unit.startswith(f"{name}.")]
        found |= {unit: module.get_submodule(unit) for unit in inside} or {name: block}
    return found


def _had_parameters(module: nn.Module) -> bool:
    """Whether there is a place for parameters: those of other stages have been taken out of theirs."""
    return any(part._parameters for part in module.modules())


def _callable_names(module: nn.Module, name: str) -> Iterator[str]:
    """A module's name, and those of the lists right above it."""
    yield name
    while "." in name:
        name = name.rpartition(".")[0]
        if not isinstance(module.get_submodule(name), _LISTS):
            return
        yield name


def _repeats(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    holds = isinstance(module, (*_LISTS, nn.Sequential))
    kinds = Counter(_kind(child) for child in module.children() if _is_block(child)) if holds else Counter()
    for name, child in module.named_children():
        if kinds[_kind(child)] > 1 and _is_block(child):
            yield prefix + name, child
        else:
            yield from _repeats(child, f"{prefix}{name}.")


def _kind(module: nn.Module) -> object:
    """A module's class; what a `Sequential` is depends on what is in it."""
    if type(module) is nn.Sequential:
        return nn.Sequential, tuple(map(_kind, module))
    return type(module)


def _is_block(module: nn.Module) -> bool:
    if isinstance(module, _LISTS) or not _had_parameters(module):
        return False
    is_layer = type(module).__module__.startswith("torch.nn.modules") and next(module.children(), None) is None
    return not is_layer
