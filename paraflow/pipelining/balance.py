"""Which units go in which stage: contiguous runs of them whose slowest is as fast as can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from torch import nn

from paraflow.errors import PlanError, some_of
from paraflow.plan_memory import as_text

if TYPE_CHECKING:
    from paraflow.pipelining.cut import Unit

_LOOKED_UP = (nn.Embedding, nn.EmbeddingBag)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_SLACK = 1 + 1e-9


def balance(times: Sequence[float], sizes: Sequence[float], stages: int, most: float = math.inf) -> list[int]:
    """Divides a row of units into stages of neighbours, none of them empty.

    No stage is larger than it may be; the slowest is as fast as can be; and of all ways that are, it is the one whose
    largest stage is the smallest.

    Args:
        times: The time of each unit.
        sizes: The bytes of each unit.
        stages: How many stages; no more than units.
        most: The bytes that a stage may have.

    Returns:
        The index of the first unit of each stage.

    Raises:
        PlanError: Some stage would be larger in every way.

    Example:
        >>> balance([0, 4, 4, 4, 4, 8], [9, 1, 1, 1, 1, 9], 3)
        [0, 3, 5]
        >>> balance([0, 4, 4, 4, 4, 8], [9, 1, 1, 1, 1, 9], 3, most=10)
        [0, 1, 4]
    """
    before, held = list(accumulate(times, initial=0.0)), list(accumulate(sizes, initial=0.0))

    def size(first: int, stop: int) -> float:
        return held[stop] - held[first]

    def time(first: int, stop: int) -> float:
        return before[stop] - before[first] if size(first, stop) <= most else math.inf

    slowest, _ = _best(times, stages, time)
    if slowest == math.inf:
        least, _ = _best(times, stages, size)
        raise PlanError(
            f"Cut in {stages} stages, the model has a stage with {as_text(int(least))} of parameters at least, and one "
            f"may have {as_text(int(most))}. Take more stages, allow more, or let fsdp or tp divide each stage further."
        )

    def size_of_the_fastest(first: int, stop: int) -> float:
        return size(first, stop) if time(first, stop) <= slowest * _SLACK else math.inf

    return _best(times, stages, size_of_the_fastest)[1]


def _best(units: Sequence[float], stages: int, cost: Callable[[int, int], float]) -> tuple[float, list[int]]:
    """The least cost that the worst of the stages can have, and where the stages then begin."""
    count = len(units)
    best = [[math.inf] * (count + 1) for _ in range(stages + 1)]
    begins = [[0] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, stages + 1):
        for stop in range(stage, count - (stages - stage) + 1):
            worst, first = min(
                (max(best[stage - 1][first], cost(first, stop)), first) for first in range(stage - 1, stop)
            )
            best[stage][stop], begins[stage][stop] = worst, first
    firsts, stop = [], count
    for stage in range(stages, 0, -1):
        stop = begins[stage][stop]
        firsts.append(stop)
    return best[stages][count], firsts[::-1]


def estimated_times(model: nn.Module, units: Sequence[Unit]) -> list[float]:
    """Returns what each unit's time is about proportional to: the multiplications that a sample takes.

    A weight that is multiplied counts once for each position that it is applied to: in a convolution the fewer, the
    more those before it have strided. What is looked up takes no time.

    Args:
        model: The model that the units are of.
        units: The units, in any order.
    """
    places = {id(unit.module): place for place, unit in enumerate(units)}
    inside = {id(part) for unit in units for part in unit.module.modules()}
    times, resolution = [0.0] * len(units), 1.0
    for module in model.modules():
        if id(module) in places:
            resolution /= max(map(_shrinks, module.modules()))
            times[places[id(module)]] = 2 * sum(
                _multiplied(part) * (resolution if isinstance(part, _CONVOLUTIONS) else 1) for part in module.modules()
            )
        elif id(module) not in inside:
            resolution /= _shrinks(module)
    return times


def measured_times(units: Sequence[Unit], costs: Mapping[str, float]) -> list[float]:
    """Returns the times that were given, unit by unit.

    Raises:
        PlanError: They do not name just the units, or one is no time.
    """
    names = {unit.name for unit in units}
    missing, unknown = names - costs.keys(), costs.keys() - names
    if missing or unknown:
        wrong = [f"they lack {some_of(sorted(missing))}"] * bool(missing)
        wrong += [f"they have {some_of(sorted(unknown))}"] * bool(unknown)
        raise PlanError(
            f"costs must give the seconds of each unit of the model, and {' and '.join(wrong)}. The units are "
            f"{some_of(sorted(names), most=40)}."
        )
    if not all(seconds >= 0 and math.isfinite(seconds) for seconds in costs.values()):
        raise PlanError(f"costs must be seconds, 0 or more, not {dict(costs)}.")
    return [float(costs[unit.name]) for unit in units]


def _multiplied(module: nn.Module) -> int:
    """The elements of the matrices that a layer itself holds; vectors are added or scaled by."""
    if isinstance(module, _LOOKED_UP):
        return 0
    return sum(p.numel() for p in module._parameters.values() if p is not None and p.dim() > 1)


def _shrinks(module: nn.Module) -> float:
    """By how much a layer divides the positions of its input."""
    kind = next((kind for kind in (*_CONVOLUTIONS, *_POOLS) if isinstance(module, kind)), None)
    if kind is None:
        return 1.0
    stride: Any = module.stride
    dimensions = int(kind.__name__[-2])  # pools may have one number for all
    return float(stride**dimensions if isinstance(stride, int) else math.prod(stride))
