"""Reads the code of classes: what their forwards do with attributes that a split would change."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import nn

_TAKE_SHAPES = ("view", "reshape", "split", "unflatten", "expand")


def mentions(kind: type, attribute: str) -> bool:
    """Whether the code of a class reads ``self.attribute`` outside ``__init__``.

    Example:
        >>> mentions(nn.Dropout, "p"), mentions(nn.Dropout, "heads")
        (True, False)
    """
    return re.search(rf"\bself\.{attribute}\b", source_of(kind)) is not None


def is_in_shapes_only(kind: type, attribute: str) -> bool:
    """Whether a class has ``self.attribute`` in shapes only, so that another number there changes no values.

    Example:
        >>> is_in_shapes_only(nn.Dropout, "p")  # it says how much is dropped
        False
    """
    return all(
        isinstance(parent, (ast.Tuple, ast.List))
        or (
            isinstance(parent, ast.Call) and isinstance(parent.func, ast.Attribute) and parent.func.attr in _TAKE_SHAPES
        )
        for parent in _uses(kind, attribute)
    )


def _uses(kind: type, attribute: str) -> Iterator[ast.AST]:
    """What it stands in, each time that the code has it."""
    for code in _methods_of(kind):
        for parent in ast.walk(ast.parse(code)):
            for node in ast.iter_child_nodes(parent):
                if isinstance(node, ast.Attribute) and node.attr == attribute and _is_self(node.value):
                    yield parent


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def is_readable(kind: type[nn.Module]) -> bool:
    """Whether the code of a forward can be read: where it cannot, nothing is derived from names in it."""
    if kind.forward is nn.Module.forward:
        return True
    try:
        return bool(inspect.getsource(inspect.unwrap(kind.forward)))
    except (OSError, TypeError):
        return False


def source_of(kind: Any) -> str:
    """Returns the code of a class's own methods, of its bases too, without ``__init__``."""
    return "\n".join(_methods_of(kind))


@cache
def _methods_of(kind: Any) -> tuple[str, ...]:
    code = []
    for base in kind.__mro__:
        if base is nn.Module or base.__module__.startswith("builtins"):
            continue
        for name, method in vars(base).items():
            if name in ("__init__", "_init_weights") or not inspect.isfunction(method):
                continue
            try:
                code.append(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))
            except (OSError, TypeError):
                continue
    return tuple(code)
