"""What a verification found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

BOUNDS: Mapping[str, float] = {"fp32": 1e-4, "fp16": 3e-2, "bf16": 1e-1}
"""How far losses and gradient norms may be apart, relative to their size, by the lowest precision in a plan.

A single step agrees to about 1e-6 in fp32; later ones differ by more.
"""

PARAMETER_BOUNDS: Mapping[str, float] = {"fp32": 1e-3, "fp16": 1e-1, "bf16": 3e-1}
"""How far parameters may be apart, as a share of the way that they have come.

Adam divides by the size of each gradient, so that a rounding of a small one leads as far as one of a large.
"""

_SHOWN = 10


@dataclass(frozen=True)
class Measured:
    """What one training measured.

    Attributes:
        losses: The loss of each step.
        norms: The gradient norm of each step; empty where the plan does not measure it.
    """

    losses: Sequence[float]
    norms: Sequence[float] = ()


@dataclass(frozen=True)
class Verification:
    """A training under a plan beside the same training on one process.

    Attributes:
        plan: The plan, in words.
        planned: What was measured under the plan.
        alone: What was measured on one process.
        parameters: For each parameter, how far its values are apart after the last step: the length of the difference,
            as a share of the length of the way that it has come.
        noise: Parameters whose gradient is nothing but rounding (the biases of attention's keys, for example): Adam
            makes large steps of it, in any direction, and they are not compared with the bound.
        bound: What the differences of losses and norms are compared with.
        parameter_bound: What those of parameters are compared with.
        without_dropout: Whether dropout was switched off, since other ranks draw other numbers.
        draws: Whether a step draws random numbers all the same: then the two trainings cannot be the same.
        note: What else is to be known, or "".

    Example:
        >>> alike = Verification("dp=2", Measured([1.0, 0.5]), Measured([1.0, 0.5]), {"weight": 1e-7}, bound=1e-4)
        >>> alike.agrees, alike.worst
        (True, 'weight')
    """

    plan: str
    planned: Measured
    alone: Measured
    parameters: Mapping[str, float] = field(default_factory=dict)
    noise: Sequence[str] = ()
    bound: float = BOUNDS["fp32"]
    parameter_bound: float = PARAMETER_BOUNDS["fp32"]
    without_dropout: bool = False
    draws: bool = False
    note: str = ""

    @property
    def loss(self) -> float:
        """The largest relative difference of a step's loss."""
        return _largest(self.planned.losses, self.alone.losses)

    @property
    def norm(self) -> float:
        """The largest relative difference of a step's gradient norm."""
        return _largest(self.planned.norms, self.alone.norms)

    @property
    def compared(self) -> dict[str, float]:
        """The differences of the parameters that have a gradient, the largest first."""
        meaningful = [name for name in self.parameters if name not in self.noise]
        ordered = sorted(meaningful, key=lambda name: -_rank(self.parameters[name]))
        return {name: self.parameters[name] for name in ordered}

    @property
    def worst(self) -> str:
        """The name of the parameter that differs most."""
        return next(iter(self.compared), "")

    @property
    def agrees(self) -> bool:
        """Whether everything is within the bound."""
        numbers = all(difference <= self.bound for difference in (self.loss, self.norm))
        return numbers and all(difference <= self.parameter_bound for difference in self.compared.values())

    def __str__(self) -> str:
        verdict = "trains as one process does" if self.agrees else "does NOT train as one process does"
        lines = [
            f"The plan ({self.plan}) {verdict}: {len(self.planned.losses)} steps, bounds "
            f"{self.bound:g} and, for parameters, {self.parameter_bound:g}.",
            f"  loss           {self.loss:.1e}   {_steps(self.planned.losses, self.alone.losses)}",
        ]
        if self.planned.norms:
            lines.append(f"  gradient norm  {self.norm:.1e}   {_steps(self.planned.norms, self.alone.norms)}")
        lines.append(f"  parameters     {self.compared.get(self.worst, 0.0):.1e}   the largest, {self.worst or 'none'}")
        lines += self._beyond()
        if self.noise:
            more = f" and {len(self.noise) - 3} more" if len(self.noise) > 3 else ""
            lines.append(f"  Not compared, since their gradient is only rounding: {', '.join(self.noise[:3])}{more}.")
        if self.without_dropout:
            lines.append("  Dropout was switched off: other ranks draw other numbers.")
        if self.draws:
            lines.append(
                "  A step draws random numbers beside dropout (noise, masks, a permutation). Other ranks draw others, "
                "so differences say nothing: switch that off to compare."
            )
        if self.note:
            lines.append(f"  {self.note}")
        return "\n".join(lines)

    def _beyond(self) -> list[str]:
        """The parameters beyond the bound, the worst first."""
        beyond = [name for name, difference in self.compared.items() if not difference <= self.parameter_bound]
        lines = [f"    {self.parameters[name]:.1e}  {name}" for name in beyond[:_SHOWN]]
        return [*lines, f"    and {len(beyond) - _SHOWN} more"] if len(beyond) > _SHOWN else lines


def _rank(difference: float) -> float:
    """Orders differences; one that is not a number is the worst."""
    return math.inf if math.isnan(difference) else difference


def _largest(mine: Sequence[float], theirs: Sequence[float]) -> float:
    differences = [_relative(one, other) for one, other in zip(mine, theirs, strict=True)]
    return max(differences, key=_rank, default=0.0)


def _relative(one: float, other: float) -> float:
    if one == other:
        return 0.0
    return abs(one - other) / max(abs(other), 1e-12)


def _steps(mine: Sequence[float], theirs: Sequence[float]) -> str:
    """The first and the last step under the plan and alone."""
    first, last = f"{mine[0]:.6g} and {theirs[0]:.6g}", f"{mine[-1]:.6g} and {theirs[-1]:.6g}"
    return f"first step {first}" + (f", last {last}" if len(mine) > 1 else "") + " (plan and one process)"
