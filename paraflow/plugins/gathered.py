"""What sharding holds on a rank besides its shards: what units gather, and gradients that are not reduced yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paraflow.plugins.units import Unit, bytes_gathered


@dataclass(frozen=True)
class Gathered:
    """Bytes on a rank.

    Attributes:
        parameters: Of gathered parameters, at most at once.
        gradients: Of gradients that are kept from one micro-batch to the next.
        held: Of all that is there in a step of one micro-batch besides shards of parameters and gradients.
        between: How much more that is where a step has several micro-batches.
    """

    parameters: int
    gradients: int
    held: int
    between: int


def gathered_bytes(
    units: Sequence[Unit],
    rest: Unit,
    *,
    shards: int,
    lets_go: bool | int,
    reduced_each: bool,
    gathered_in: torch.dtype | None = None,
) -> Gathered:
    """Returns what a rank holds while a sharded model is run.

    Units are gathered one ahead. In the backward of one there are its parameters, its gradients, and the parameters of
    the next; to reduce gradients takes a copy of them, when the parameters have been let go of. What no unit holds
    stays gathered all through.

    Args:
        units: The units, in the order of forward.
        rest: What no unit holds.
        shards: The number of ranks a parameter is sharded over.
        lets_go: Whether units are let go of between forward and backward, or to how many ranks they are sharded then.
        reduced_each: Whether gradients are reduced in every micro-batch.
        gathered_in: The dtype parameters are gathered in, or None for their own.
    """
    sizes, trained = [_size(unit, gathered_in) for unit in units], [_trained(unit, units) for unit in units]
    own, own_trained = _size(rest, gathered_in), _trained(rest, units)
    whole, gradients = own + sum(sizes), own_trained + sum(trained)
    shard = gradients // shards
    # Of parameters and gradients; where parameters have been let go of, of gradients and their copy.
    busy = [max(size, trains) + trains for size, trains in zip(sizes, trained, strict=True)]
    pairs = [here + ahead for here, ahead in zip(busy, [0, *sizes], strict=False)]
    in_turn = own + max([own_trained, *pairs])
    at_once = max([own + first for first in sizes] or [own])
    if lets_go is False:
        parameters = whole
        held = max(in_turn, whole + 2 * max(trained, default=own_trained) - shard)
        several = whole + 2 * max(trained, default=own_trained) if reduced_each else whole + gradients - shard
    else:
        stay = 0 if lets_go is True else sum(sizes) // lets_go
        parameters, held = own + stay + max(sizes, default=0), in_turn + stay
        several = held if reduced_each else held + gradients - shard - max(trained, default=0)
    kept = shard if reduced_each else gradients
    return Gathered(max(parameters, at_once), kept, held, max(several - held, 0))


def _size(unit: Unit, dtype: torch.dtype | None) -> int:
    if dtype is None or not unit.bytes:
        return unit.bytes
    return unit.bytes * dtype.itemsize // next(unit.module.parameters()).element_size()


def _trained(unit: Unit, units: Sequence[Unit]) -> int:
    """The bytes of what is trained of a unit, without that of units inside it."""
    parts = {id(part) for part in unit.module.modules()} - {id(unit.module)}
    others = [other for other in units if id(other.module) in parts]
    inner = {id(parameter) for other in others for parameter in other.module.parameters()}
    return sum(bytes_gathered(p) for p in unit.module.parameters() if p.requires_grad and id(p) not in inner)
