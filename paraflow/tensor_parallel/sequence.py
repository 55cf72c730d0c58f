"""Sequence parallelism between split layers (Korthikanti et al. 2022): ranks hold shares of the sequence.

In a run of blocks, hidden states are [batch, tokens / degree, hidden]. The first block's input is cut, an attention
gathers the tokens of all ranks in front and scatters behind, so do feed-forward layers, and the last block's output is
joined. What stands between (norms, dropout, residual sums) sees the share, so the gradients of its parameters are sums
over the ranks, as are those of biases behind a row-split layer. What else a block is given (masks, positions) stays
whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paraflow.errors import DataError, PlanError
from paraflow.tensor_parallel.derive import Attention, is_linear, joined
from paraflow.tensor_parallel.dropout import Drops, OwnStream
from paraflow.tensor_parallel.layout import Layout
from paraflow.tensor_parallel.region import Region

_HIDDEN_STATES = ("hidden_states", "x", "src", "input", "inputs")


@dataclass(frozen=True)
class BlockRun:
    """Blocks that are called one after another, each with what the one before returned.

    Attributes:
        blocks: Their names.
    """

    blocks: tuple[str, ...]


class Gathered(Region):
    """The region inside an attention whose input has been gathered as it was called: entering costs nothing more."""

    def __init__(self, region: Region) -> None:
        super().__init__(region.device_mesh, region.gathers)
        self.replaced = region.replaced

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what has been gathered already."""
        return x


def find_runs(module: nn.Module, layout: Layout) -> list[BlockRun]:
    """Returns the runs of blocks between which the sequence can be shared out.

    Every block has a split attention, and all else in it treats each token by itself.

    Raises:
        PlanError: There is none.
    """
    runs: list[BlockRun] = []
    refused = ""
    for name, owner in module.named_modules():
        if not isinstance(owner, (nn.ModuleList, nn.Sequential)) or not len(owner):
            continue
        blocks = [joined(name, key) for key, _ in owner.named_children()]
        attentions = [[a for a in layout.attentions if a.name.startswith(f"{block}.")] for block in blocks]
        if not any(attentions):
            continue
        reasons = [_why_not(module, block, inside, layout) for block, inside in zip(blocks, attentions, strict=True)]
        refused = refused or next((reason for reason in reasons if reason), "")
        inner = any(f"{name}.".startswith(f"{other}.") for run in runs for other in run.blocks)
        if not any(reasons) and not inner:
            runs.append(BlockRun(tuple(blocks)))
    if refused or not runs:
        raise PlanError(
            "sequence_parallel=True was asked for, and it takes a ModuleList or Sequential of blocks that each have a "
            "split self-attention and otherwise treat each token by itself; "
            f"{refused or 'there is no such run of blocks'}. Leave sequence_parallel out."
        )
    return runs


def _why_not(module: nn.Module, block: str, attentions: Sequence[Attention], layout: Layout) -> str:
    if len(attentions) != 1:
        return f"{block} has {len(attentions)} of them"
    split = {*layout.names, *(norm for a in attentions for norm in a.norms)}
    for name, inner in module.get_submodule(block).named_modules(prefix=block):
        if not any(p is not None for p in inner._parameters.values()) or name in split:
            continue
        if not (is_linear(inner) or isinstance(inner, (nn.LayerNorm, nn.RMSNorm)) or "RMSNorm" in type(inner).__name__):
            return f"{name} is a {type(inner).__name__}, which may look at several tokens"
    return ""


def whole_parameters(module: nn.Module, runs: Sequence[BlockRun]) -> list[str]:
    """Returns the names of the parameters in the runs that are not divided: their gradients are sums over the ranks.

    Raises:
        PlanError: One of them is used outside of the runs too.
    """
    inside = {name for run in runs for block in run.blocks for name in _parameters_in(module, block)}
    owners: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for names in owners.values():
        if 0 < len(inside.intersection(names)) < len(names):
            raise PlanError(
                f"sequence_parallel=True was asked for, and {names[0]} and {names[-1]} are one parameter, of which one "
                "is in a block that sees a share of the sequence. Leave sequence_parallel out."
            )
    return sorted(inside)


def _parameters_in(module: nn.Module, block: str) -> Iterator[str]:
    for name, parameter in module.get_submodule(block).named_parameters(prefix=block, remove_duplicate=False):
        if not hasattr(parameter, "to_local"):
            yield name


def share_out(module: nn.Module, runs: Sequence[BlockRun], layout: Layout, region: Region, stream: OwnStream) -> None:
    """Has runs of blocks compute on shares of the sequence.

    Args:
        module: The model, whose layers have been split in `region` (attention inside: in a `Gathered` one).
        runs: The runs.
        layout: How it is split.
        region: The region, with ``gathers=1``.
        stream: What is random on the shares is drawn from it.
    """
    region.even = True  # the sequence is divided evenly, or refused
    for run in runs:
        blocks = [module.get_submodule(name) for name in run.blocks]
        drops = [Drops(block) for block in blocks]
        blocks[0].register_forward_pre_hook(_Scatter(region, drops, stream), with_kwargs=True)
        blocks[-1].register_forward_hook(_Join(region, stream))
        for attention in layout.attentions:
            if any(attention.name.startswith(f"{name}.") for name in run.blocks):
                module.get_submodule(attention.name).register_forward_pre_hook(_Enter(region), with_kwargs=True)


class _Scatter:
    """Cuts the hidden states that the first block is given."""

    def __init__(self, region: Region, drops: Sequence[Drops], stream: OwnStream) -> None:
        self._region, self._drops, self._stream = region, drops, stream

    def __call__(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        changed = with_hidden_states(block, args, kwargs, self._cut)
        if any(self._drops):
            self._stream.begin()
        return changed

    def _cut(self, hidden: torch.Tensor) -> torch.Tensor:
        degree = self._region.degree
        if hidden.dim() < 3 or hidden.shape[1] % degree:
            raise DataError(
                f"sequence_parallel=True shares out the tokens over tp={degree} ranks, and hidden states of shape "
                f"{tuple(hidden.shape)} were given, [batch, tokens, features], whose tokens it does not divide. Pad "
                f"sequences to a multiple of {degree}, or leave sequence_parallel out."
            )
        return self._region.scatter(hidden, 1)


class _Join:
    """Joins the hidden states that the last block returns."""

    def __init__(self, region: Region, stream: OwnStream) -> None:
        self._region, self._stream = region, stream

    def __call__(self, block: nn.Module, args: Any, output: Any) -> Any:
        self._stream.end()
        if isinstance(output, torch.Tensor):
            return self._region.collect(output, 1)
        if isinstance(output, tuple) and output and isinstance(output[0], torch.Tensor):
            return (self._region.collect(output[0], 1), *output[1:])
        raise DataError(
            f"Under sequence_parallel=True a block returns its hidden states, alone or first in a tuple, and "
            f"{type(block).__name__} returned a {type(output).__name__}. Leave sequence_parallel out."
        )


class _Enter:
    """Gathers the hidden states that an attention is given."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def __call__(self, attention: nn.Module, args: Any, kwargs: Any) -> Any:
        return with_hidden_states(attention, args, kwargs, self._region.enter)


def with_hidden_states(module: nn.Module, args: Any, kwargs: Mapping[str, Any], change: Any) -> Any:
    """Returns a module's arguments with its hidden states changed.

    Args:
        module: The module.
        args: Its arguments by place; hidden states are the first, [batch, tokens, hidden].
        kwargs: Its arguments by name.
        change: What hidden states are given to.

    Raises:
        DataError: There are none.
    """
    if args and isinstance(args[0], torch.Tensor):
        return (change(args[0]), *args[1:]), dict(kwargs)
    for name in _HIDDEN_STATES:
        if isinstance(kwargs.get(name), torch.Tensor):
            return args, {**kwargs, name: change(kwargs[name])}
    raise DataError(
        f"Under sequence_parallel=True {type(module).__name__} is to be given its hidden states first, or as one of "
        f"{', '.join(_HIDDEN_STATES)}; it was given {list(kwargs)}. Leave sequence_parallel out."
    )
