"""Logits by the table of token embeddings, where it is also the output projection."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function


def project(hidden: Tensor, table: nn.Embedding, bias: Tensor | None = None) -> Tensor:
    """The scores of a table's entries (Press and Wolf 2017).

    A table that is split over ranks brings a `project` of its own, and the scores stay split as it is.

    Args:
        hidden: Float [..., features].
        table: The embedding, [entries, features].
        bias: Float [entries], or None.

    Returns:
        Float [..., entries].

    Example:
        >>> import torch
        >>> project(torch.ones(3, 2), nn.Embedding(5, 2)).shape
        torch.Size([3, 5])
    """
    own = vars(table).get("project")
    return F.linear(hidden, table.weight, bias) if own is None else _project(hidden, table.weight, bias, table)


def _project(hidden: Tensor, weight: Tensor, bias: Tensor | None, table: nn.Embedding) -> Tensor:
    """The scores of a split table: one call to who watches torch's functions, with a whole weight in its place."""
    given = (hidden, weight)
    if has_torch_function(given):
        return handle_torch_function(_project, given, hidden, weight, bias, table)
    own = vars(table)["project"]
    return own(hidden, bias) if weight is table.weight else F.linear(hidden, weight, bias)
