"""What functions between units are: custom ones, which torch does not show to those who watch, and those that draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import overrides
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def functions_seen(seen: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Has every call of a custom autograd function made by another one, while a block runs.

    Args:
        seen: Called with the function's own ``apply`` and what it is given; returns what it returns.

    Example:
        >>> import torch
        >>> class Twice(Function):
        ...     forward = staticmethod(lambda ctx, x: x * 2)
        >>> with functions_seen(lambda apply, args, kwargs: apply(*args) + 1):
        ...     print(Twice.apply(torch.ones(1)))
        tensor([3.])
    """
    own = Function.__dict__["apply"]

    @wraps(own.__func__)
    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        return seen(own.__get__(None, cls), args, kwargs)

    setattr(Function, "apply", classmethod(apply))  # noqa: B010  # mypy allows no assignment to a method
    try:
        yield
    finally:
        setattr(Function, "apply", own)  # noqa: B010


def is_custom(func: Callable[..., Any]) -> bool:
    """Whether a function is the ``apply`` of a custom autograd function."""
    owner = getattr(func, "__self__", None)
    return isinstance(owner, type) and issubclass(owner, Function)


class Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether random numbers are drawn from a generator of torch.

    Attributes:
        seen: Whether they have been.

    Example:
        >>> with Drawing() as drawing:
        ...     x = torch.nn.functional.dropout(torch.ones(2), 0.5)
        >>> drawing.seen
        True
    """

    def __init__(self, *, seen: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Looks at one operation."""
        self.seen = self.seen or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


@contextmanager
def aside(mode: TorchFunctionMode) -> Iterator[None]:
    """Runs a block that a mode of torch functions does not see; others stay."""
    modes: Any = overrides  # torch offers no other way to leave one mode of several
    above: list[Any] = []
    while mode in modes._get_current_function_mode_stack():
        above.append(modes._pop_mode())
    for other in reversed(above[:-1]):
        modes._push_mode(other)
    try:
        yield
    finally:
        for _ in above[:-1]:
            modes._pop_mode()
        for other in reversed(above):
            modes._push_mode(other)
