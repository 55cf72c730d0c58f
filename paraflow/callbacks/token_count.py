"""Counts the tokens of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from paraflow.errors import DataError


def token_counter(tokens: Callable[[Any], Any] | str | None) -> Callable[[Any], Any]:
    """Returns a function from a batch to its number of tokens.

    Args:
        tokens: That function; or the key of a tensor whose elements are the tokens; or ``"auto"``, which takes an int32
            or int64 tensor of shape [samples, length] that is the batch itself, or is called ``input_ids`` in it, and
            else counts none; or None, which counts none. Padding is counted: write a function to leave it out.

    Example:
        >>> token_counter("auto")({"input_ids": torch.zeros(4, 8, dtype=torch.int64)})
        32
        >>> token_counter("auto")(torch.zeros(4, 8)), token_counter("text")({"text": torch.zeros(3)})
        (0, 3)
    """
    if callable(tokens):
        return tokens
    return _no_tokens if tokens is None else _input_ids if tokens == "auto" else partial(_elements, key=tokens)


def _no_tokens(batch: Any) -> int:
    return 0


def _input_ids(batch: Any) -> int:
    tensor = batch.get("input_ids") if isinstance(batch, Mapping) else getattr(batch, "input_ids", batch)
    if isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.int32, torch.int64) and tensor.dim() == 2:
        return tensor.numel()
    return 0


def _elements(batch: Any, key: str) -> int:
    tensor = batch.get(key) if isinstance(batch, Mapping) else getattr(batch, key, None)
    if not isinstance(tensor, torch.Tensor):
        there = f"has {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"is a {type(batch).__name__}"
        raise DataError(
            f"Throughput should count the tokens of {key!r}, and the batch {there}: name a tensor in it, or give a "
            "function of the batch."
        )
    return tensor.numel()
