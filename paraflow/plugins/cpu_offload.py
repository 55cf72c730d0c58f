"""What lives on the host: the optimizer with its state, or units of the model's parameters too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from paraflow.errors import PlanError, some_of
from paraflow.parts import is_spread, local
from paraflow.plan import Plan
from paraflow.plan_memory import as_text
from paraflow.plugins.base import Phase, Plugin
from paraflow.plugins.units import Unit

if TYPE_CHECKING:
    from paraflow.engine import Engine
    from paraflow.optim.update import Held

_HALVES = (torch.float16, torch.bfloat16)


class CPUOffload(Plugin):
    """Keeps parts of the training on the host.

    ``"optimizer"``: for each trained parameter the optimizer holds a copy on the host, in fp32 where the parameter is
    half, and its state is there too. Gradients are copied to it, the apply runs there, and weights are copied back;
    under ``apply_groups=k`` a group at a time. What somebody else changes in the model's weights between steps is
    taken up by the copy. Where parameters are half, checkpoints have the copy as ``master_weight`` in the optimizer's
    state, so that a resumed run goes on with every digit.

    Everything else names parameters that live on the host with their optimizer: all (``"params"``), a fraction of
    the bytes, or patterns of module names. The sharding that divides a model into units brings a unit to the device
    for its forward and backward (`FSDP`); this plugin stands for the plan's field.

    Args:
        what: ``"optimizer"``, ``"params"``, a fraction above 0 and up to 1, or patterns of module names.
    """

    name = "cpu_offload"
    phase = Phase.OPTIMIZE

    def __init__(self, what: str | float | Sequence[str] = "optimizer") -> None:
        self.what: Any = what if isinstance(what, (str, int, float)) else tuple(what)
        Plan(cpu_offload=self.what)  # says what it may be

    @property
    def fields(self) -> Mapping[str, Any]:
        """What lives on the host."""
        return {"cpu_offload": self.what}

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, engine: Engine) -> torch.optim.Optimizer:
        """Gives the optimizer copies on the host to hold, where that is asked for.

        Raises:
            PlanError: The optimizer looks at whole parameters, and ranks hold shards of them.
        """
        if self.what != "optimizer":
            return optimizer
        if any(is_spread(held.tensor) for held in engine.update.held):
            raise PlanError(
                f"[offload-whole-parameters] {type(optimizer).__name__}, a hook of it or a method that is not torch's "
                "may look at whole parameters, which are sharded, and cpu_offload='optimizer' keeps a rank's shards on "
                "the host. Use one of torch's optimizers that treat elements one by one, such as adamw, without hooks, "
                "or leave cpu_offload out.",
                rule="offload-whole-parameters",
            )
        _bring_values(optimizer)
        engine.update.hold(_host_copy)
        copies = [held.tensor for held in engine.update.held if held.is_copy]
        count = sum(tensor.numel() * tensor.element_size() for tensor in copies)
        engine.say(
            f"cpu_offload: {as_text(count)} of master weights on the host, and what the optimizer keeps for them"
        )
        return optimizer

    def describe(self) -> str:
        """Returns one line for the printed plan."""
        if self.what == "optimizer":
            return "optimizer state and master weights on the host, and applied there"
        if self.what == "params":
            return "all parameters and the optimizer on the host; each unit on the device while it is used"
        if isinstance(self.what, tuple):
            return f"parameters of {', '.join(self.what)} and their optimizer on the host"
        return f"{self.what:.0%} of the parameters' bytes and their optimizer on the host, in whole units"


def _host_copy(held: Held) -> torch.Tensor:
    if not held.parameter.requires_grad:
        return held.tensor
    own = local(held.parameter).detach()
    dtype = torch.float32 if own.dtype in _HALVES else own.dtype
    # Another device copies to and from pinned memory without waiting.
    place = torch.empty_like(own, device="cpu", dtype=dtype, pin_memory=own.device.type == "cuda")
    return place.copy_(own)


def _bring_values(optimizer: torch.optim.Optimizer) -> None:
    """Values that an optimizer keeps on the device for its kernels there have to be where it is applied."""
    for group in optimizer.param_groups:
        if group.get("capturable"):
            group["capturable"] = False
        for key, value in group.items():
            if isinstance(value, torch.Tensor):
                group[key] = value.cpu()


def chosen_units(units: Sequence[Unit], what: Any, tensors: Iterable[str] = ()) -> set[str]:
    """Returns the names of the units that live on the host.

    Args:
        units: The model's units, in the order in which forward uses them.
        what: ``"params"`` (all), a fraction of the bytes, or patterns of module names: a unit is chosen where one names
            it, a module inside it, or one that it is inside of. Of a fraction, units are spread evenly over the model,
            so that each copy has computation to hide behind, and at least one is chosen.
        tensors: The names of the whole model's tensors, where these are the units of some stages: a pattern may name
            what only others have.

    Raises:
        PlanError: A pattern matches nothing.
    """
    if what == "params":
        return {unit.name for unit in units}
    if isinstance(what, (int, float)):
        return _spread(units, float(what))
    owners = _owners(units)
    for tensor in tensors:
        for length in range(1, len(parts := tensor.split("."))):
            owners.setdefault(".".join(parts[:length]), set())
    return {name for pattern in what for name in _matching(owners, pattern)}


def _owners(units: Sequence[Unit]) -> dict[str, set[str]]:
    """The units that hold the parameters of a module and of what is inside it, by the module's name."""
    owners: dict[str, set[str]] = {}
    # Outer units come first, so that a module that an inner one holds is the inner one's in the end.
    own: dict[str, str] = {}
    for unit in sorted(units, key=lambda unit: len(unit.name)):
        for inside, module in unit.module.named_modules():
            if any(parameter is not None for parameter in module._parameters.values()):
                own[".".join(part for part in (unit.name, inside) if part)] = unit.name
    for path, name in own.items():
        parts = path.split(".")
        for length in range(1, len(parts) + 1):
            owners.setdefault(".".join(parts[:length]), set()).add(name)
    return owners


def _matching(owners: dict[str, set[str]], pattern: str) -> set[str]:
    found = [names for path, names in owners.items() if fnmatchcase(path, pattern)]
    if found:
        return set().union(*found)
    names = [path or "the model itself" for path in owners]
    shown = some_of(names, most=10)
    raise PlanError(
        f"[offload-pattern] cpu_offload has the pattern {pattern!r}, which names no module that has parameters. The "
        f"modules that have some are: {shown}.",
        rule="offload-pattern",
    )


def _spread(units: Sequence[Unit], fraction: float) -> set[str]:
    """Each unit passes on what of its share it was not given; then one more or less, where that is closer."""
    wanted = fraction * sum(unit.bytes for unit in units)
    chosen, owed = [], 0.0
    for unit in units:
        owed += fraction * unit.bytes
        if owed >= unit.bytes / 2 and unit.bytes:
            chosen.append(unit)
            owed -= unit.bytes
    others = [unit for unit in units if unit not in chosen and unit.bytes]
    missing = wanted - sum(unit.bytes for unit in chosen)
    candidates = others if missing > 0 else chosen
    closer = min(candidates, key=lambda unit: abs(abs(missing) - unit.bytes), default=None)
    if closer is not None and abs(abs(missing) - closer.bytes) < abs(missing):
        chosen = [unit for unit in chosen if unit is not closer] if closer in chosen else [*chosen, closer]
    if not chosen and others:
        chosen = [min(others, key=lambda unit: unit.bytes)]
    return {unit.name for unit in chosen}


def from_plan(plan: Plan, options: Mapping[str, Any]) -> CPUOffload | None:
    """Returns the plugin that a plan asks for, or None."""
    return None if plan.cpu_offload is None else CPUOffload(plan.cpu_offload, **options)
