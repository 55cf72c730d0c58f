"""Whether ranks that hold the same parameters hold the same bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from paraflow.debug.sentences import name_ranks
from paraflow.errors import ParaflowError

if TYPE_CHECKING:
    from paraflow.engine import Engine

_CHUNK = 2**20
_TOLD = 5
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_FACTOR, _MIXING = -7046029254386353131, -4658895280553007687  # odd, with bits in no order
_SEPARATOR = "\x1f"


def require_equal(engine: Engine, step: int) -> None:
    """Compares the parameters of all ranks, bit by bit: a collective.

    Compared are all parameters, frozen ones too, each among the ranks that hold the same part of it, the number of
    steps the optimizer has counted, and the learning rates. Equal bits are equal, also those of NaN. Not compared are
    buffers, which may differ from rank to rank (the statistics of a BatchNorm layer do), and the optimizer's
    averages, of which a rank may hold a part only; if they differ, the parameters do after the next step.

    Args:
        engine: The engine, between two steps.
        step: The step to tell.

    Raises:
        ParaflowError: Ranks differ: which, and in which parameters; the same on every rank.
    """
    if engine.mesh.world_size == 1:
        return
    lines = [_SEPARATOR.join(line) for line in _held(engine)]
    differing = list(_differing([text.split("\n") for text in engine.mesh.gather_texts("\n".join(lines))]))
    if not differing:
        return
    told = "; ".join(differing[:_TOLD])
    more = f"; and {len(differing) - _TOLD} more" if len(differing) > _TOLD else ""
    raise ParaflowError(
        f"Step {step}: ranks that must hold the same parameters do not. {len(differing)} of {len(lines)} differ: "
        f"{told}{more}. Something changed them on some ranks only: a callback under `if trainer.is_main:`, random "
        "numbers that differ from rank to rank, or gradients that were not averaged."
    )


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a number that differs where the bits of two tensors of one shape do, but for one case in 2**64.

    Args:
        tensor: Any tensor of any dtype; it stays on its device.

    Returns:
        A tensor of shape [], dtype int64, on the same device: the sum over positions of the element's bits times a
        number made from the position, modulo 2**64.

    Example:
        >>> a, b = torch.tensor([1.0, float("nan")]), torch.tensor([float("nan"), 1.0])
        >>> bool(fingerprint(a) == fingerprint(a.clone())), bool(fingerprint(a) == fingerprint(b))
        (True, False)
    """
    flat = tensor.detach().reshape(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weights = _weights(min(_CHUNK, bits.numel()), tensor.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK]
        total = total * _FACTOR + (part.to(torch.int64) * weights[: part.numel()]).sum()
    return total


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers that look random, for each position."""
    mixed = (torch.arange(count, dtype=torch.int64, device=device) + 1) * _FACTOR
    return ((mixed ^ (mixed >> 31)) * _MIXING) | 1


def _held(engine: Engine) -> Iterator[tuple[str, str, str]]:
    """What this rank holds: a name, the part of it that is here, and its bits or value."""
    named = dict(engine.module.named_parameters())
    local = [parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in named.values()]
    if local:
        numbers = torch.stack([fingerprint(tensor).to(engine.mesh.device) for tensor in local]).tolist()
        for (name, parameter), tensor, number in zip(named.items(), local, numbers, strict=True):
            yield name, _part(engine, name, parameter), f"{number} {tensor.dtype} {list(tensor.shape)}"
    if hasattr(engine, "optimizer"):
        for index, group in enumerate(engine.optimizer.param_groups):
            yield f"the learning rate of parameter group {index}", "", repr(float(group["lr"]))
        yield "the optimizer's count of steps", "", str(_steps(engine))


def _part(engine: Engine, name: str, parameter: torch.nn.Parameter) -> str:
    asking = [plugin for plugin in engine.plugins if plugin.overrides("partitioned_over")]
    dims = sorted({dim for plugin in asking for dim in plugin.partitioned_over(name, parameter) or ()})
    return " ".join(f"{dim}={engine.mesh.coordinate(dim)}" for dim in dims)


def _steps(engine: Engine) -> int:
    """The most steps any parameter has had; a rank may hold the state of some only."""
    states: list[dict[str, Any]] = list(engine.optimizer.state.values())
    counts = [torch.as_tensor(state["step"]).reshape(()) for state in states if "step" in state]
    if not counts:
        return 0
    return int(torch.stack([count.to(engine.mesh.device, torch.float64) for count in counts]).max())


def _differing(held: list[list[str]]) -> Iterator[str]:
    """Names what is not the same on all ranks that hold it, in the order of the lowest of them."""
    values: dict[tuple[str, str], dict[int, str]] = {}
    for rank, lines in enumerate(held):
        for line in lines:
            name, part, value = line.split(_SEPARATOR)
            values.setdefault((name, part), {})[rank] = value
    for (name, part), by_rank in values.items():
        counts = Counter(by_rank.values())
        if len(counts) > 1:
            usual = counts.most_common(1)[0][0]
            yield f"{name}{f' [{part}]' if part else ''} ({_which(by_rank, usual)})"


def _which(by_rank: dict[int, str], usual: str) -> str:
    most = [rank for rank, value in by_rank.items() if value == usual]
    others = [rank for rank, value in by_rank.items() if value != usual]
    verb = "differs" if len(others) == 1 else "differ"
    return f"{name_ranks(others)} {verb} from {name_ranks(most)}"
