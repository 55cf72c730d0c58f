"""What a model takes on a rank's device besides its activations: while it runs, and while its optimizer is applied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from paraflow.parts import local

if TYPE_CHECKING:
    from paraflow.engine import Engine
    from paraflow.optim.update import Held

_UNKNOWN = 2
"""Tensors of a parameter's size that an optimizer of unknown make is taken to allocate in its step."""


@dataclass(frozen=True)
class Standing:
    """Bytes on a rank's device besides activations.

    Attributes:
        there: What is allocated before the first step.
        running: While forward and backward run: also gradients, the optimizer's state, what plugins gather.
        applying: While the optimizer is applied: also what it allocates for that.
    """

    there: int
    running: int
    applying: int


def standing(engine: Engine, accumulate: int) -> Standing:
    """Returns what a model takes on this rank's device besides its activations.

    On CUDA all that is allocated already counts. On the host these are parameters, buffers, what the optimizer holds,
    and what plugins and callbacks say that they hold.

    Args:
        engine: The engine, before its first step.
        accumulate: Micro-batches of a step.
    """
    device = engine.mesh.device
    there = _allocated(engine, device)
    kept = there + _state_to_come(engine, device.type)
    trained = [tensor.nbytes for tensor in map(local, engine.parameters) if tensor.device.type == device.type]
    gradients = max(trained, default=0) if engine.plan.apply_groups == "backward" else sum(trained)
    held = sum(p.bytes_held + (p.bytes_between if accumulate > 1 else 0) for p in engine.plugins)
    return Standing(there, kept + gradients + held, kept + gradients + _allocated_in_step(engine, device.type))


def _allocated(engine: Engine, device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    held = [*engine.module.parameters(), *engine.module.buffers()]
    held += [one.tensor for one in engine.update.held if one.is_copy]
    held += [value for state in engine.optimizer.state.values() for value in _tensors(state)]
    own = {id(tensor): local(tensor) for tensor in held}.values()
    return sum(tensor.nbytes for tensor in own if tensor.device.type == device.type) + engine.hooks.bytes_held()


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    return (value for value in state.values() if torch.is_tensor(value)) if isinstance(state, dict) else iter(())


def _state_to_come(engine: Engine, device: str) -> int:
    """What the optimizer will make for parameters that have no state yet."""
    optimizer, held = engine.optimizer, engine.update.by_tensor
    return sum(
        local(tensor).nbytes * _slots(group)
        for group in optimizer.param_groups
        for tensor in group["params"]
        if held[id(tensor)].parameter.requires_grad
        and local(tensor).device.type == device
        and not optimizer.state.get(tensor)
    )


def _slots(group: Mapping[str, Any]) -> int:
    """Tensors of a parameter's shape that an optimizer keeps for it, told by its options."""
    if "betas" in group:
        return 2 + bool(group.get("amsgrad"))
    if "rho" in group or "etas" in group:
        return 2
    averages = "alpha" in group or "lr_decay" in group
    return int(averages) + bool(group.get("momentum")) + bool(group.get("centered"))


def _allocated_in_step(engine: Engine, device: str) -> int:
    """The most that the optimizer allocates at once: of one of the groups that it is applied in."""
    optimizer, update = engine.optimizer, engine.update
    option = {id(tensor): group for group in optimizer.param_groups for tensor in group["params"]}
    shares = [[held] for held in update.held] if engine.plan.apply_groups == "backward" else update.shares
    return max((_for_share(share, option, device) for share in shares), default=0)


def _for_share(share: Sequence[Held], option: Mapping[int, Mapping[str, Any]], device: str) -> int:
    """Temporaries of a share's step, and the copies of its gradients where the optimizer holds copies."""
    together: dict[int, list[int]] = {}
    copies = 0
    for held in share:
        own = local(held.tensor)
        if own.device.type == device and held.parameter.requires_grad:
            together.setdefault(id(option[id(held.tensor)]), []).append(own.nbytes)
            copies += own.nbytes if held.is_copy else 0
    groups = {id(group): group for group in option.values()}
    return copies + max((_temporaries(groups[key], sizes, device) for key, sizes in together.items()), default=0)


def _temporaries(group: Mapping[str, Any], sizes: Sequence[int], device: str) -> int:
    """What torch's optimizers allocate for a step over one of their groups; see ``torch.optim``.

    A fused kernel allocates nothing. For-each operations make a tensor for each parameter at a time, and the plain loop
    two for one parameter: the root of Adam's second moment, and its quotient.
    """
    if group.get("fused"):
        return 0
    decays = bool(group.get("weight_decay")) and not group.get("decoupled_weight_decay", False)
    foreach = group.get("foreach")
    if foreach is None and "foreach" in group:
        foreach = device == "cuda"
    if "betas" in group and "foreach" in group:
        made = (1 if foreach else 2) + decays
    elif "nesterov" in group:
        made = int(decays) + bool(group["nesterov"])
    else:
        made = _UNKNOWN
    return made * (sum(sizes) if foreach else max(sizes))
