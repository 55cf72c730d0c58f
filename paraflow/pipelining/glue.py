"""Which weights code between the units uses by itself, as tied heads do: ``F.linear(x, self.table.weight)``.

It is read, not run, for a model is laid out before there is data. What only running shows, the first trace finds.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from paraflow.pipelining.cut import Unit

_ENTRIES = ("forward", "training_step", "validation_step", "predict_step", "loss")
_UNKNOWN = object()


def weights_used_by_glue(model: nn.Module, units: Sequence[Unit]) -> list[str]:
    """Returns the names of the parameters of units that code outside of the units mentions.

    A table (`nn.Embedding`) that is given to a function counts as its weight.

    The steps and forwards of the modules that are no part of a unit are read, and the methods that they call. Branches
    of an ``if`` that the model as it is does not take are left out, where the condition is an attribute, or whether one
    is None.

    Args:
        model: The model.
        units: Its units.

    Example:
        >>> from paraflow.models import MaskedLM, MaskedLMConfig
        >>> from paraflow.pipelining.cut import units_of
        >>> model = MaskedLM(MaskedLMConfig(vocab_size=258, layers=2, hidden=32, heads=2, context=16))
        >>> weights_used_by_glue(model, units_of(model))
        ['embedding.weight']
    """
    inside = {id(part) for unit in units for part in unit.module.modules()}
    names = {id(p): name for name, p in model.named_parameters()}
    of_units = {id(p) for unit in units for p in unit.module.parameters()}
    used = {
        id(value)
        for module in model.modules()
        if id(module) not in inside
        for value in _mentioned(module)
        if isinstance(value, nn.Parameter)
    }
    return [names[key] for key in names if key in used & of_units]


def glue_time(model: nn.Module, mentioned: Sequence[str]) -> float:
    """Returns the time of what code between the units does with weights, in the measure of `estimated_times`."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return 2.0 * sum(named[name].numel() for name in mentioned)


def _mentioned(module: nn.Module) -> Iterator[Any]:
    """What a module's steps read of its attributes."""
    waiting, seen = list(_ENTRIES), set(_ENTRIES)
    while waiting:
        code = _parsed(getattr(type(module), waiting.pop(), None))
        if code is None:
            continue
        for chain in _chains(code.body, module, code.args.args[0].arg if code.args.args else "self"):
            if len(chain) == 1 and inspect.isfunction(getattr(type(module), chain[0], None)) and chain[0] not in seen:
                seen.add(chain[0])
                waiting.append(chain[0])
            yield _value(module, chain)


def _parsed(function: Callable[..., Any] | None) -> ast.FunctionDef | None:
    """The code of a method that the user wrote; torch's own modules have no weights of others."""
    if not inspect.isfunction(function) or function.__module__.startswith("torch."):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return None
    return next((node for node in tree.body if isinstance(node, ast.FunctionDef)), None)


def _chains(nodes: Sequence[ast.AST], module: nn.Module, me: str) -> Iterator[tuple[str, ...]]:
    """The attributes that code reads of a module (``("table", "weight")``), without branches that are not taken."""
    for node in nodes:
        chain = _chain(node, me)
        if chain:
            yield chain
        if isinstance(node, ast.Call):
            given = [_chain(argument, me) for argument in (*node.args, *(k.value for k in node.keywords))]
            yield from ((*table, "weight") for table in given if isinstance(_value(module, table), nn.Embedding))
        if isinstance(node, (ast.If, ast.IfExp)):
            taken = _condition(node.test, module, me)
            yield from _chains([node.test], module, me)
            if taken is not False:
                yield from _chains(_listed(node.body), module, me)
            if taken is not True:
                yield from _chains(_listed(node.orelse), module, me)
        else:
            yield from _chains(list(ast.iter_child_nodes(node)), module, me)


def _listed(branch: Any) -> list[ast.AST]:
    return branch if isinstance(branch, list) else [branch]


def _chain(node: ast.AST, me: str) -> tuple[str, ...]:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return tuple(reversed(parts)) if isinstance(node, ast.Name) and node.id == me else ()


def _condition(test: ast.AST, module: nn.Module, me: str) -> bool | None:
    """What a condition comes to for a module as it is, or None where that is not known."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _condition(test.operand, module, me)
        return None if inner is None else not inner
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], (ast.Is, ast.IsNot)):
        other, value = test.comparators[0], _value(module, _chain(test.left, me))
        if value is _UNKNOWN or not (isinstance(other, ast.Constant) and other.value is None):
            return None
        return (value is None) == isinstance(test.ops[0], ast.Is)
    value = _value(module, _chain(test, me))
    return value if isinstance(value, bool) else None


def _value(module: nn.Module, chain: tuple[str, ...]) -> Any:
    """What a chain of attributes leads to, without running properties of modules that could do anything."""
    value: Any = module if chain else _UNKNOWN
    for name in chain:
        if isinstance(value, nn.Module):
            held = (value._modules, value._parameters, value.__dict__)
            value = next((store[name] for store in held if name in store), _UNKNOWN)
        else:
            value = getattr(value, name, _UNKNOWN)
        if value is _UNKNOWN:
            return _UNKNOWN
    return value
