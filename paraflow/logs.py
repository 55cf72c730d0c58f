"""What callbacks are told: a dict of numbers that waits for the device only when it is read."""

from __future__ import annotations

from collections.abc import ItemsView, ValuesView
from typing import Any

import torch


class Logs(dict[str, Any]):
    """A dict whose 0-dim tensors become numbers when they are read. Reading never communicates between ranks.

    Example:
        >>> Logs(loss=torch.tensor(0.5))["loss"]
        0.5
    """

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            value = value.item()
            self[key] = value
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the number under a key, or the default."""
        return self[key] if key in self else default

    def items(self) -> ItemsView[str, Any]:
        """Returns keys and numbers."""
        self._read_all()
        return super().items()

    def values(self) -> ValuesView[Any]:
        """Returns the numbers."""
        self._read_all()
        return super().values()

    def _read_all(self) -> None:
        for key in self:
            self[key]
