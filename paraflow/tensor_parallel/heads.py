"""Attention split by its heads: which heads a rank computes, also where their number is no multiple of the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from paraflow.errors import PlanError
from paraflow.tensor_parallel.derive import Attention
from paraflow.tensor_parallel.layers import local_part, set_forward, split_columns, split_rows
from paraflow.tensor_parallel.reading import is_in_shapes_only, mentions
from paraflow.tensor_parallel.region import Region

Ranges = tuple[tuple[int, int], ...]

_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
_GROUPS = ("num_key_value_groups", "n_rep")
_WIDTHS = ("split_size", "all_head_size", "inner_dim", "embed_dim", "hidden_size", "dim", "n_embd", "d_model")


@dataclass(frozen=True)
class HeadShare:
    """The heads of one rank.

    Attributes:
        queries: The query heads that it computes.
        keys: The key and value heads that these look at, each as often as it stands for a head of its own.
        divides_queries: Whether the ranks hold equally many query heads, so that their weights are divided. If not,
            each rank keeps the whole weight and multiplies with the rows of its heads.
        divides_keys: The same of keys and values.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    divides_queries: bool
    divides_keys: bool


def share_of(attention: Attention, degree: int, rank: int) -> HeadShare:
    """Returns the heads that a rank computes.

    Raises:
        PlanError: There are fewer heads than ranks.

    Example:
        >>> llama = Attention("a", "q", "k", "v", "o", heads=8, kv_heads=2, head_dim=64)
        >>> share_of(llama, degree=4, rank=1)
        HeadShare(queries=(2, 3), keys=(0,), divides_queries=True, divides_keys=False)
        >>> share_of(llama, degree=3, rank=0).queries
        (0, 1, 2)
    """
    heads, kv_heads = attention.heads, attention.kv_heads
    if heads < degree:
        raise PlanError(
            f"{attention.name or 'The attention'} has {heads} heads, which tp={degree} ranks cannot share out: some "
            f"would have none. Write a tp of at most {heads} (best one of {_divisors(heads)}), or leave its layers "
            "whole: plugins=[pf.plugins.TensorParallel("
            f"{degree}, plan={{{', '.join(f'{name!r}: {_WHOLE!r}' for name in attention.layers)}}})]."
        )
    each, more = divmod(heads, degree)
    first = rank * each + min(rank, more)
    queries = tuple(range(first, first + each + (rank < more)))
    group = heads // kv_heads
    needed = [query // group for query in queries]
    keys = sorted(set(needed))
    alike = len({needed.count(key) for key in keys}) == 1
    divides = more == 0
    return HeadShare(queries, tuple(keys if alike else needed), divides, divides and kv_heads % degree == 0)


_WHOLE = "replicate"


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(2, number + 1) if number % divisor == 0]


def split_attention(module: nn.Module, attention: Attention, inside: Region, outside: Region) -> list[str]:
    """Splits an attention by its heads, and tells it how many it has on this rank.

    Args:
        module: The model.
        attention: Its attention.
        inside: The region that the projections of queries, keys and values enter.
        outside: The region that the output projection leaves.

    Returns:
        The names of parameters that stay whole although each rank uses a part of them: their gradients are to be
        added up over the ranks.
    """
    share = share_of(attention, inside.degree, inside.rank)
    partial_sums: list[str] = []
    parts = 3 if attention.fused else 1
    wanted = {
        attention.query: (share.queries, share.divides_queries),
        attention.key: (share.queries if attention.fused else share.keys, share.divides_keys),
        attention.value: (share.queries if attention.fused else share.keys, share.divides_keys),
    }
    for name, (heads, divides) in wanted.items():
        layer = module.get_submodule(name)
        if divides:
            split_columns(layer, inside, parts=parts)
        else:
            _select_columns(layer, inside, _features(heads, attention, parts))
            partial_sums += [f"{name}.{key}" for key, value in layer._parameters.items() if value is not None]
    out = module.get_submodule(attention.out)
    if share.divides_queries:
        split_rows(out, outside)
    else:
        _select_rows(out, outside, _features(share.queries, attention))
        partial_sums.append(f"{attention.out}.weight")
    for norm in attention.norms:
        partial_sums += [f"{norm}.{key}" for key, _ in module.get_submodule(norm).named_parameters()]
    _tell(module.get_submodule(attention.name), attention, share)
    return partial_sums


def _tell(holder: nn.Module, attention: Attention, share: HeadShare) -> None:
    """Sets the attributes that say how many heads there are, and how wide they are together."""
    heads, kv_heads = attention.heads, attention.kv_heads
    width = heads * attention.head_dim
    queries, keys = len(share.queries), len(share.keys)
    _set(holder, _COUNTS, heads, queries)
    _set(holder, _KEY_COUNTS, kv_heads, keys)
    _set(holder, _GROUPS, heads // kv_heads, queries // keys)
    kind = type(holder)
    shapes = [name for name in _WIDTHS if mentions(kind, name) and is_in_shapes_only(kind, name)]
    _set(holder, shapes, width, queries * attention.head_dim)


def _set(holder: nn.Module, names: Iterable[str], whole: int, own: int) -> None:
    for name in names:
        if vars(holder).get(name) == whole:
            setattr(holder, name, own)


def _features(heads: Sequence[int], attention: Attention, parts: int = 1) -> Ranges:
    """Where the features of some heads lie, in each part of a fused layer: neighbouring ranges are joined.

    Example:
        >>> _features([0, 1, 3], Attention("a", "q", "k", "v", "o", heads=4, kv_heads=4, head_dim=8))
        ((0, 16), (24, 32))
    """
    ranges: list[tuple[int, int]] = []
    for part in range(parts):
        offset = part * attention.heads * attention.head_dim
        for head in heads:
            start = offset + head * attention.head_dim
            end = start + attention.head_dim
            if ranges and ranges[-1][1] == start:
                ranges[-1] = ranges[-1][0], end
            else:
                ranges.append((start, end))
    return tuple(ranges)


def _select_columns(layer: nn.Module, region: Region, ranges: Ranges) -> None:
    """Has a layer compute some of its outputs; its weight stays whole."""
    set_forward(layer, partial(_selected_columns, ranges=ranges), region)


def _select_rows(layer: nn.Module, region: Region, ranges: Ranges) -> None:
    """Has a layer take some of its inputs, and the ranks add up their outputs; its weight stays whole."""
    set_forward(layer, partial(_selected_rows, ranges=ranges), region)


def _selected_columns(layer: nn.Module, region: Region, x: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    bias = None if layer.bias is None else _take(local_part(layer.bias), 0, ranges)
    return functional.linear(region.enter(x), _take(_outputs_first(layer), 0, ranges), bias)


def _selected_rows(layer: nn.Module, region: Region, x: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    summed = region.leave(functional.linear(x, _take(_outputs_first(layer), 1, ranges)))
    return summed if layer.bias is None else summed + local_part(layer.bias)


def _outputs_first(layer: nn.Module) -> torch.Tensor:
    """A layer's weight as [outputs, inputs]; transformers' Conv1D has it the other way round."""
    weight = local_part(layer.weight)
    return weight if isinstance(layer, nn.Linear) else weight.t()


def _take(tensor: torch.Tensor, dim: int, ranges: Ranges) -> torch.Tensor:
    pieces = [tensor.narrow(dim, start, end - start) for start, end in ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
