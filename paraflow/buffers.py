"""A module's buffers as they were at a moment, also where a forward puts other tensors in their place."""

from __future__ import annotations

import torch
from torch import nn


class Buffers:
    """The buffers of a module, kept to be put back.

    A buffer that is changed in place is copied back; one for which another tensor was put (``self.count = self.count +
    1``) is put back itself.

    Args:
        module: The module.

    Example:
        >>> layer = nn.BatchNorm1d(1); kept = Buffers(layer); kept.keep()
        >>> _ = layer(torch.tensor([[1.0], [3.0]])); kept.put_back()
        >>> layer.running_mean
        tensor([0.])
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [(owner._buffers, leaf) for owner in module.modules() for leaf in owner._buffers]
        # Torch updates running statistics without counting it as a change.
        self._statistics = {
            place
            for place, (owner, _) in enumerate((part, leaf) for part in module.modules() for leaf in part._buffers)
            if getattr(owner, "track_running_stats", False)
        }
        self._changing: set[int] | None = None
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._seen: dict[int, tuple[torch.Tensor, int]] = {}

    def keep(self) -> None:
        """Copies those that change: all at first, and from then on those of which a change was seen."""
        now = {place: tensor for place, (owner, leaf) in enumerate(self._places) if (tensor := owner[leaf]) is not None}
        if self._changing is None:
            copied, self._changing = set(now), set(self._statistics)
        else:
            moved = (place for place, tensor in now.items() if self._has_moved(place, tensor))
            self._changing |= set(moved)
            copied = self._changing & now.keys()
        self._seen = {place: (tensor, tensor._version) for place, tensor in now.items()}
        self._kept = {place: (now[place], now[place].detach().clone()) for place in copied}

    def _has_moved(self, place: int, tensor: torch.Tensor | None) -> bool:
        before = self._seen.get(place)
        return before is None or before[0] is not tensor or before[1] != before[0]._version

    @torch.no_grad()
    def put_back(self) -> None:
        """Undoes what has changed since."""
        for place, (tensor, copy) in self._kept.items():
            owner, leaf = self._places[place]
            if self._changing is not None and self._has_moved(place, owner[leaf]):
                self._changing.add(place)
            owner[leaf] = tensor
            tensor.copy_(copy)
            self._seen[place] = (tensor, tensor._version)
