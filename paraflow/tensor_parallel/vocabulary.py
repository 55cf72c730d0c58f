"""Embeddings whose rows, and output layers whose classes, are divided over ranks."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from paraflow.errors import ModelError
from paraflow.tensor_parallel.layers import (
    Bound,
    features_of,
    has_inputs_first,
    local_bias,
    local_part,
    multiply,
    require_linear,
    set_forward,
    split_parameter,
)
from paraflow.tensor_parallel.region import Region
from paraflow.tensor_parallel.split_logits import SplitLogits


def split_vocabulary(table: nn.Embedding, region: Region) -> None:
    """Splits an embedding's rows: each rank looks up those that it has, and the results are summed.

    Used as an output projection too (`paraflow.nn.tied.project`), its scores are `SplitLogits`.

    Args:
        table: The embedding; its weights may be on the meta device. The rows need not be a multiple of the ranks.
        region: The ranks. With `gathers=1` the indices are whole and the result is a share of the sequence.

    Raises:
        ModelError: It is of a kind whose rows cannot be divided.
    """
    if type(table).forward is not nn.Embedding.forward or table.sparse or table.max_norm is not None:
        raise ModelError(
            f"{table!r} cannot be split by its rows: it takes an nn.Embedding with a forward of its class, without "
            "sparse gradients and max_norm. Leave it whole ('replicate')."
        )
    if table.scale_grad_by_freq:
        raise ModelError(
            f"{table!r} cannot be split by its rows with scale_grad_by_freq; leave it whole ('replicate')."
        )
    if region.degree == 1:
        return
    split_parameter(table, "weight", region, 0)
    set_forward(table, _lookup, region)
    table.project = MethodType(Bound(_project, region), table)  # type: ignore[assignment]


def split_head(module: nn.Module, region: Region) -> None:
    """Splits an output layer's classes: each rank computes the logits of some, and they stay so, as `SplitLogits`.

    Args:
        module: An `nn.Linear`, or transformers' Conv1D. Its weights may be on the meta device, and shared with an
            embedding that `split_vocabulary` splits in the same region.
        region: The ranks.

    Raises:
        ModelError: It is no linear layer, or its weight is split in another way already.
    """
    require_linear(module)
    if region.degree == 1:
        return
    split_parameter(module, "weight", region, 1 if has_inputs_first(module) else 0)
    if module.bias is not None:
        split_parameter(module, "bias", region, 0)
    set_forward(module, _head, region)


def _lookup(table: nn.Module, region: Region, indices: torch.Tensor) -> torch.Tensor:
    weight = local_part(table.weight)
    start, end = region.range_of(int(table.num_embeddings))  # type: ignore[arg-type]
    if region.gathers == 0:
        indices = region.enter(indices)
    inside = (indices >= start) & (indices < end)
    if start == end:  # a rank without rows takes part in the sum
        found = weight.new_zeros((*indices.shape, weight.shape[1])) + weight.sum()
    else:
        padding: Any = table.padding_idx
        own_padding = padding - start if padding is not None and start <= padding < end else None
        found = functional.embedding((indices - start).where(inside, 0), weight, own_padding)
    return region.leave(found.masked_fill(~inside[..., None], 0))


def _head(module: nn.Module, region: Region, x: torch.Tensor) -> torch.Tensor:
    return _scores(module, region, x, local_bias(module), features_of(module)[1])


def _project(table: nn.Module, region: Region, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    rows: Any = table.num_embeddings
    if bias is not None:
        bias = local_part(bias) if hasattr(bias, "to_local") else region.split_last(bias)
    return _scores(table, region, x, bias, rows)


def _scores(
    module: nn.Module, region: Region, x: torch.Tensor, bias: torch.Tensor | None, classes: int
) -> torch.Tensor:
    if region.pools:
        rows = region.enter(x.reshape(x.shape[:-1].numel(), x.shape[-1]))
        logits = SplitLogits.of_all_rows(multiply(rows, module, bias), region, classes, x.shape[:-1])
    else:
        logits = SplitLogits.of_copies(multiply(region.enter(x), module, bias), region, classes)
    region.forget()
    return logits
