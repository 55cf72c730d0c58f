"""Optimizers of the user's own where this rank has nothing that they train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch.optim import Optimizer


@contextmanager
def may_be_empty() -> Iterator[None]:
    """Has torch make optimizers over no parameters, which it refuses by itself: they have one group, that is empty.

    A stage of a model may have nothing to train, or nothing of what an optimizer is for. Its rank has the same groups,
    learning rate and schedule as the others even so.

    Example:
        >>> import torch
        >>> with may_be_empty():
        ...     optimizer = torch.optim.AdamW([], lr=0.1)
        >>> optimizer.step(), optimizer.param_groups[0]["params"], optimizer.param_groups[0]["lr"]
        (None, [], 0.1)
    """
    plain = Optimizer.__init__

    @wraps(plain)
    def make(self: Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        given = params if isinstance(params, (list, dict)) or hasattr(params, "shape") else list(params)
        plain(self, [{"params": []}] if isinstance(given, (list, dict)) and not given else given, defaults)

    Optimizer.__init__ = make  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.__init__ = plain  # type: ignore[method-assign]
