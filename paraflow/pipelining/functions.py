"""Custom autograd functions between units, which torch does not show to those who watch its functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch.autograd import Function


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
