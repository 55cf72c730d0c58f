"""Splits a model's layers as a layout says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paraflow.errors import PlanError
from paraflow.tensor_parallel.checking import Check, Group, Links, groups_of
from paraflow.tensor_parallel.derive import find_feed_forwards
from paraflow.tensor_parallel.dropout import Drops, OwnStream, own_stream_between
from paraflow.tensor_parallel.heads import split_attention
from paraflow.tensor_parallel.layers import features_of, split_columns, split_rows
from paraflow.tensor_parallel.layout import Kind, Layout
from paraflow.tensor_parallel.region import Region
from paraflow.tensor_parallel.sequence import (
    BlockRun,
    Gathered,
    find_runs,
    share_out,
    whole_parameters,
    with_hidden_states,
)
from paraflow.tensor_parallel.vocabulary import split_head, split_vocabulary


@dataclass(frozen=True)
class Applied:
    """What was split.

    Attributes:
        partial: The names of parameters that are whole on every rank, and whose gradients are sums over the ranks.
        stream: Where what is random in split layers comes from.
        uneven: The attentions whose weights stay whole because the ranks compute different numbers of heads.
        runs: The runs of blocks that compute on shares of the sequence.
    """

    partial: frozenset[str]
    stream: OwnStream
    uneven: tuple[str, ...]
    runs: tuple[BlockRun, ...]


def split(module: nn.Module, layout: Layout, region: Region, device: torch.device, *, shares: bool = False) -> Applied:
    """Splits layers in place.

    Args:
        module: The model. What has memory is brought to the device, a layer at a time.
        layout: What is split, and how.
        region: The ranks, which hold the same activations outside of split layers.
        device: The device.
        shares: Whether ranks hold shares of the sequence between split layers.

    Raises:
        PlanError: A layer's features cannot be divided over the ranks.
    """
    _require_divisible(module, layout, region)
    runs = find_runs(module, layout) if shares else []
    stream = OwnStream(region.rank, device)
    between = Region(region.device_mesh, 1) if runs else region
    between.replaced = region.replaced
    inside = Gathered(between) if runs else region
    pairs = list(_pairs_that_drop(module, layout)) if not runs else []
    checks = _checks(module, layout, region, runs)
    for name in layout.names:
        _bring(module.get_submodule(name), device)
    partial: list[str] = []
    for attention in layout.attentions:
        partial += split_attention(module, attention, inside, between)
    blocks = {block for run in runs for block in run.blocks}
    for name, kind in layout.kinds.items():
        in_run = any(name.startswith(f"{block}.") for block in blocks)
        partial += _split_layer(module, name, kind, between if in_run else region)
    _tie(module, region)
    for columns, rows, drops in pairs:
        own_stream_between(columns, rows, drops, stream)
    if runs:
        share_out(module, runs, layout, between, stream)
        partial += whole_parameters(module, runs)
        for run in runs:
            Links([module.get_submodule(name) for name in run.blocks], run.blocks, between, with_hidden_states)
    for check in checks:
        check.watch(partial)
    uneven = tuple(a.name for a in layout.attentions if a.heads % region.degree)
    return Applied(frozenset(partial), stream, uneven, tuple(runs))


def _checks(module: nn.Module, layout: Layout, region: Region, runs: Sequence[BlockRun]) -> list[Check]:
    """What is compared with whole layers in the first step: each group of layers, or each block of a run."""
    if region.degree == 1:
        return []
    blocks = [block for run in runs for block in run.blocks]
    inside = {block: tuple(name for name in layout.names if name.startswith(f"{block}.")) for block in blocks}
    checks = [
        Check(module, Group(block, layers), region, blocks=True, change=with_hidden_states)
        for block, layers in inside.items()
    ]
    taken = {name for layers in inside.values() for name in layers}
    attentions = [(attention.layers, attention.heads) for attention in layout.attentions]
    pairs = [f.layers for f in find_feed_forwards(module, {name for layers, _ in attentions for name in layers})]
    pairs = [layers for layers in pairs if layout.kinds.get(layers[-1]) == "rowwise"]
    groups = groups_of(module, attentions, pairs, layout.kinds, layout.said)
    return checks + [Check(module, group, region) for group in groups if taken.isdisjoint(group.layers)]


def _split_layer(module: nn.Module, name: str, kind: Kind, region: Region) -> list[str]:
    """Splits one layer; returns its parameters whose gradients are sums over the ranks."""
    layer = module.get_submodule(name)
    if kind == "colwise" or kind == "colwise_joined":
        split_columns(layer, region, joins=kind == "colwise_joined")
    elif kind == "rowwise":
        split_rows(layer, region)
    elif kind == "logits":
        split_head(layer, region)
    elif kind == "vocabulary":
        assert isinstance(layer, nn.Embedding)
        split_vocabulary(layer, region)
    elif kind == "partial":
        return [f"{name}.{key}" for key, _ in layer.named_parameters()]
    return []


def _tie(module: nn.Module, region: Region) -> None:
    """Gives what shares a parameter with a split layer, such as BERT's bias of its output layer, the part too."""
    for owner in module.modules():
        for key, parameter in list(owner._parameters.items()):
            known = region.replaced.get(id(parameter))
            if parameter is not None and known is not None and known[0]() is parameter:
                owner.register_parameter(key, known[1])


def _require_divisible(module: nn.Module, layout: Layout, region: Region) -> None:
    """Uneven parts are right for features that are treated one by one; of others it is not known."""
    for name, kind in layout.kinds.items():
        if kind not in ("colwise", "rowwise") or name in layout.unaligned:
            continue
        inputs, outputs = features_of(module.get_submodule(name))
        size, what = (outputs, "outputs") if kind == "colwise" else (inputs, "inputs")
        if size % region.degree:
            fitting = [n for n in range(2, region.degree) if size % n == 0]
            raise PlanError(
                f"{name} has {size} {what}, which tp={region.degree} does not divide, and what is between it and the "
                "next split layer is not known to treat each feature by itself. "
                + (f"Write tp={fitting[-1]}, or s" if fitting else "S")
                + f"ay 'replicate' of it: TensorParallel({region.degree}, plan={{{name!r}: 'replicate'}})."
            )


def _pairs_that_drop(module: nn.Module, layout: Layout) -> Iterator[tuple[nn.Module, nn.Module, Drops]]:
    """Column- and row-split layers with the dropout that may act on what is between them."""
    for attention in layout.attentions:
        drops = Drops(module.get_submodule(attention.name))
        yield module.get_submodule(attention.query), module.get_submodule(attention.out), drops
    taken = {name for attention in layout.attentions for name in attention.layers}
    for pair in find_feed_forwards(module, taken):
        if layout.kinds.get(pair.rows) == "rowwise":
            taken |= {*pair.columns, pair.rows}
            columns = module.get_submodule(pair.columns[-1])
            yield columns, module.get_submodule(pair.rows), Drops(module.get_submodule(pair.name))
    yield from _other_pairs(module, {name: kind for name, kind in layout.kinds.items() if name not in taken})


def _other_pairs(module: nn.Module, kinds: Mapping[str, Kind]) -> Iterator[tuple[nn.Module, nn.Module, Drops]]:
    """The same of layers that only the plan says to be pairs: those that are nearest to each other in the model."""
    columns = [name for name, kind in kinds.items() if kind == "colwise"]
    for rows in (name for name, kind in kinds.items() if kind == "rowwise"):
        owner = rows.rpartition(".")[0]
        while owner and not any(name.startswith(f"{owner}.") for name in columns):
            owner = owner.rpartition(".")[0]
        drops = Drops(module.get_submodule(owner))
        for name in columns:
            if not owner or name.startswith(f"{owner}."):
                yield module.get_submodule(name), module.get_submodule(rows), drops


def _bring(layer: nn.Module, device: torch.device) -> None:
    """A part stays where its whole was, so the whole goes to the device first."""
    for parameter in layer._parameters.values():
        if parameter is not None and not parameter.is_meta and not hasattr(parameter, "to_local"):
            parameter.data = parameter.data.to(device)
