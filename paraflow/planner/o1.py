"""``auto="O1"``: fills what the user left out, one choice after another, each with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

GIB = 1024**3
_SHARE_OF_FREE_MEMORY = 0.8
"""What is planned for: allocators fragment, and some operations need room of their own."""

_BYTES_PER_PARAMETER = 16
"""fp32 parameter, gradient and the two moments of Adam, 4 bytes each."""


@dataclass(frozen=True)
class Choice:
    """One field that was filled in.

    Attributes:
        field: The plan's field.
        value: What it was set to.
        reason: Why, as it is printed.
    """

    field: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Machine:
    """What is known of the devices.

    Attributes:
        world_size: The number of ranks.
        device: The type of device.
        bf16: Whether it computes in bf16 natively.
        fused_optimizers: Whether torch has fused optimizers for it.
    """

    world_size: int
    device: str
    bf16: bool
    fused_optimizers: bool


@dataclass(frozen=True)
class Footprint:
    """What one rank needs and has, in bytes.

    Attributes:
        parameters: Parameters of the model, in number.
        activations: What forward keeps for backward, for one sample.
        free: Free memory of the device, or of the host for each of its ranks.
    """

    parameters: int
    activations: int
    free: int


def choose(machine: Machine, given: dict[str, Any]) -> list[Choice]:
    """Chooses what does not depend on the data.

    Args:
        machine: The devices.
        given: The fields that the user has said.

    Returns:
        A choice for each field that was left out.

    Example:
        >>> cpu = Machine(world_size=2, device="cpu", bf16=False, fused_optimizers=True)
        >>> for choice in choose(cpu, {"precision": "fp32"}):
        ...     print(choice.field, choice.value)
        dp 2
        optimizer_implementation fused
    """
    return [
        choice
        for choice in (_data_parallel(machine, given), _precision(machine), _optimizer(machine))
        if choice.field not in given
    ]


def _data_parallel(machine: Machine, given: dict[str, Any]) -> Choice:
    taken = math.prod(given.get(name, 1) for name in ("pp", "fsdp", "cp", "tp"))
    degree = max(1, machine.world_size // taken)
    if degree == 1:
        return Choice("dp", 1, "there is one rank" if machine.world_size == 1 else "the other degrees fill the world")
    return Choice("dp", degree, f"a replica on each of {degree} ranks: the model fits on one")


def _precision(machine: Machine) -> Choice:
    if machine.device == "cuda" and machine.bf16:
        return Choice("precision", "bf16", "this device multiplies matrices in bf16 at several times fp32's rate")
    if machine.device == "cuda":
        return Choice("precision", "fp16", "this device has fast fp16 and no bf16; the loss is scaled")
    return Choice("precision", "fp32", f"half precision is no faster for training on this {machine.device} device")


def _optimizer(machine: Machine) -> Choice:
    if machine.fused_optimizers:
        return Choice("optimizer_implementation", "fused", "one kernel over all parameters, where the optimizer has it")
    return Choice("optimizer_implementation", "default", f"torch has no fused optimizers for {machine.device}")


def choose_accumulation(footprint: Footprint, share: int) -> Choice:
    """Chooses how many micro-batches a rank's share of a batch is run in, so that they fit.

    Args:
        footprint: What a rank needs and has.
        share: The samples of a full batch on one rank.

    Example:
        >>> choose_accumulation(Footprint(parameters=10**6, activations=50 * 2**20, free=2 * GIB), share=128).value
        4
    """
    left = footprint.free * _SHARE_OF_FREE_MEMORY - footprint.parameters * _BYTES_PER_PARAMETER
    fitting = max(1, int(left // max(footprint.activations, 1)))
    steps = min(share, math.ceil(share / fitting))
    sample = _size(footprint.activations)
    if steps == 1:
        reason = f"{share} samples at {sample} of activations each fit in {_size(footprint.free)} of free memory"
    else:
        reason = (
            f"{math.ceil(share / steps)} of {share} samples at {sample} of activations each fit at once in "
            f"{_size(footprint.free)} of free memory"
        )
    return Choice("accumulate", steps, reason)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
