"""What callbacks are told: a dict of numbers that waits for the device only when it is read."""

from __future__ import annotations

from collections.abc import Iterator
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

    def __iter__(self) -> Iterator[str]:
        # Without an __iter__ of its own, `{**logs}` would copy the values past __getitem__.
        return super().__iter__()

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the number under a key, or the default."""
        return self[key] if key in self else default  # noqa: SIM401 (it is what the rule would call)

    def pop(self, key: str, *default: Any) -> Any:
        """Returns the number under a key and removes it, or returns the default."""
        if key in self:
            self[key]
        return super().pop(key, *default)

    def items(self) -> Any:
        """Returns keys and numbers."""
        self._read_all()
        return super().items()

    def values(self) -> Any:
        """Returns the numbers."""
        self._read_all()
        return super().values()

    def _read_all(self) -> None:
        for key in self:
            self[key]
