"""The units of a model, and the stages that they are put in: each unit in exactly one."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from paraflow.errors import ModelError, PlanError, some_of
from paraflow.pipelining.balance import balance, estimated_times, measured_times

Stages = Sequence[str] | Sequence[Sequence[str]]

_LISTS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Unit:
    """A module that a stage runs as a whole.

    Attributes:
        name: Its name in the model.
        module: The module.
    """

    name: str
    module: nn.Module


@dataclass(frozen=True)
class Cut:
    """A model cut into stages.

    Attributes:
        stages: The units of each stage, in the order in which they are expected to be called.
        shares: The share of the whole time that each stage is expected to take.
        parameters: The number of parameters of each stage's units; one that is tied counts once in each.
    """

    stages: tuple[tuple[Unit, ...], ...]
    shares: tuple[float, ...]
    parameters: tuple[int, ...]

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """The names of the units of each stage."""
        return tuple(tuple(unit.name for unit in stage) for stage in self.stages)

    def describe(self) -> list[str]:
        """Returns a line for each stage: its units, parameters and share of the time."""
        lines = []
        for place, (stage, share, count) in enumerate(zip(self.stages, self.shares, self.parameters, strict=True)):
            first, last = stage[0].name, stage[-1].name
            span = first if first == last else f"{first} to {last}"
            lines.append(f"stage {place}: {span}, {count:,} parameters, {share:.0%} of the time")
        return lines


def units_of(model: nn.Module, named: Sequence[str] = ()) -> list[Unit]:
    """Returns the units of a model, in its order.

    They are the modules that are called and hold parameters (or buffers that a checkpoint has): repeated blocks, which
    are children of one class in a ModuleList or ModuleDict, the children of a Sequential, and beside them the largest
    modules that hold none of these. What is left over belongs to no unit: it runs on every stage that needs it.

    Args:
        model: The model; it may be without memory.
        named: Modules that units must not reach over: a unit that would is taken apart.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> [unit.name for unit in units_of(net)]
        ['0', '2']
        >>> [unit.name for unit in units_of(nn.ModuleDict({"table": nn.Embedding(9, 4), "body": net}))]
        ['table', 'body.0', 'body.2']
    """
    seen: set[int] = set()
    found = [Unit("", model)] if _is_whole(model) and not any(named) else list(_units(model, "", named, seen))
    return _in_planned_order(model, found)


def cut(
    model: nn.Module,
    count: int,
    *,
    stages: Stages | None = None,
    costs: Mapping[str, float] | None = None,
    glue: float = 0.0,
    most_bytes: float = math.inf,
) -> Cut:
    """Puts the units of a model in stages.

    Args:
        model: The model; it may be without memory.
        count: The number of stages.
        stages: The names of the modules of each stage; or names of which each begins a further stage. None balances.
        costs: The seconds that each unit takes, by name; None estimates them from weights.
        glue: What the last stage multiplies beside its units, as weights: a tied head.
        most_bytes: The bytes of parameters that a stage may have, where stages are balanced.

    Raises:
        PlanError: A stage would have more. The names do not fit the model or the number of stages.
        ModelError: The model has fewer units than stages.
    """
    named = [] if stages is None else [one for part in stages for one in ([part] if isinstance(part, str) else part)]
    units = units_of(model, named)
    times = estimated_times(model, units) if costs is None else measured_times(units, costs)
    if stages is None:
        _require_enough(model, units, count)
        sizes = [float(sum(p.nbytes for p in unit.module.parameters())) for unit in units]
        weighed = times if costs is not None else [*times[:-1], times[-1] + glue]
        parts = _sliced(units, balance(weighed, sizes, count, most_bytes))
    elif all(isinstance(part, str) for part in stages):
        parts = _begun_by(model, units, named, count)
    else:
        parts = _listed(model, units, [[p] if isinstance(p, str) else list(p) for p in stages], count)
    by_name = {unit.name: time for unit, time in zip(units, times, strict=True)}
    spent = [sum(by_name[unit.name] for unit in part) for part in parts]
    spent[-1] += glue if costs is None else 0.0
    whole = sum(spent) or 1.0
    counts = [sum({id(p): p.numel() for unit in part for p in unit.module.parameters()}.values()) for part in parts]
    return Cut(tuple(map(tuple, parts)), tuple(time / whole for time in spent), tuple(counts))


def _units(module: nn.Module, prefix: str, named: Sequence[str], seen: set[int]) -> Iterator[Unit]:
    repeated = _repeated(module)
    for key, child in _in_order_of_call(module):
        if id(child) in seen:
            continue
        name = f"{prefix}{key}"
        block = type(child) in repeated and not isinstance(child, _LISTS) and _runs(child)
        if any(one.startswith(f"{name}.") for one in named) or not (block or _is_whole(child)):
            yield from _units(child, f"{name}.", named, seen)
        elif _holds(child):
            seen.add(id(child))
            yield Unit(name, child)


def _in_order_of_call(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children; those that forward calls, or goes through, stand in the order in which its code does so."""
    children = [(key, child) for key, child in module._modules.items() if child is not None]
    try:
        code = ast.parse(textwrap.dedent(inspect.getsource(type(module).forward)))
    except (OSError, TypeError, SyntaxError):  # there is no file of it
        return children
    order = list(dict.fromkeys(_called(code)))
    called = iter(sorted((pair for pair in children if pair[0] in order), key=lambda pair: order.index(pair[0])))
    return [next(called) if key in order else (key, child) for key, child in children]


def _called(node: ast.AST) -> Iterator[str]:
    """The attributes of ``self`` that code calls or iterates over; what is called with a result comes behind it."""
    if isinstance(node, (ast.For, ast.comprehension)):
        parts = [part for part in ast.walk(node.iter) if isinstance(part, ast.Attribute)]
    else:
        parts = [node.func] if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else []
    own = [part.attr for part in parts if isinstance(part.value, ast.Name) and part.value.id == "self"]
    if isinstance(node, ast.For):
        yield from own
    for child in ast.iter_child_nodes(node):
        yield from _called(child)
    if not isinstance(node, ast.For):
        yield from own


def _is_whole(module: nn.Module) -> bool:
    """Whether a module is best run as one: it is called, and nothing in it is made of parts that stand in a row."""
    if isinstance(module, nn.MultiheadAttention) or hasattr(module, "parametrizations"):
        return True
    if not _runs(module) or _is_row(module):
        return False
    return not any(_is_row(part) or _repeated(part) for part in module.modules())


def _is_row(module: nn.Module) -> bool:
    """Whether a module does nothing but call its children in order."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _repeated(module: nn.Module) -> set[type]:
    """The classes of which a list of modules holds several."""
    if not isinstance(module, _LISTS):
        return set()
    counts = Counter(type(child) for child in module._modules.values() if child is not None and _holds(child))
    return {kind for kind, count in counts.items() if count > 1}


def _runs(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def _holds(module: nn.Module) -> bool:
    """Whether a module has something that a checkpoint has."""
    return any(
        parameters or buffers.keys() - part._non_persistent_buffers_set
        for part in module.modules()
        for parameters, buffers in [(part._parameters, part._buffers)]
    )


def _in_planned_order(model: nn.Module, units: list[Unit]) -> list[Unit]:
    """Orders units as the model's own `_pp_plan` does, as transformers' models have it: names in order of call."""
    plans = [
        (f"{name}.{key}" if name else key)
        for name, module in model.named_modules()
        for key in (getattr(module, "pp_plan", None) or getattr(module, "_pp_plan", None) or {})
    ]
    ranks = {key: place for place, key in enumerate(sorted(plans, key=lambda key: -key.count(".")))}
    if not ranks:
        return units

    def place(unit: Unit) -> int | None:
        return next((at for key, at in ranks.items() if unit.name == key or unit.name.startswith(f"{key}.")), None)

    planned = sorted((unit for unit in units if place(unit) is not None), key=lambda unit: place(unit) or 0)
    following = iter(planned)
    return [unit if place(unit) is None else next(following) for unit in units]


def _sliced(units: Sequence[Unit], firsts: Sequence[int]) -> list[list[Unit]]:
    stops = [*firsts[1:], len(units)]
    return [list(units[first:stop]) for first, stop in zip(firsts, stops, strict=True)]


def _begun_by(model: nn.Module, units: Sequence[Unit], named: Sequence[str], count: int) -> list[list[Unit]]:
    """Stages of which each but the first begins with the first unit of a named module."""
    if len(named) != count - 1:
        raise PlanError(
            f"stages names {len(named)} modules that begin a further stage ({', '.join(named)}), and {count} stages "
            f"take {count - 1}."
        )
    firsts = [0]
    for one in named:
        inside = [place for place, unit in enumerate(units) if _within(unit, one)]
        if not inside:
            raise PlanError(f"stages names {one!r}, {_no_unit(model, units)}")
        if inside[0] <= firsts[-1]:
            raise PlanError(
                f"stages names {one!r}, which comes before what begins the stage before it. Name modules in the order "
                f"in which they are called: {_told(units)}."
            )
        firsts.append(inside[0])
    return _sliced(units, firsts)


def _listed(model: nn.Module, units: Sequence[Unit], parts: list[list[str]], count: int) -> list[list[Unit]]:
    """Stages of which each is given by all its modules."""
    if len(parts) != count:
        raise PlanError(f"stages lists the modules of {len(parts)} stages, and the plan has {count}.")
    found: list[list[Unit]] = [[] for _ in parts]
    for unit in units:
        holders = [place for place, names in enumerate(parts) if any(_within(unit, name) for name in names)]
        if len(holders) != 1:
            where = f"stages {holders} name it" if holders else "no stage names it"
            raise PlanError(f"Each module belongs to exactly one stage, and of {unit.name!r} {where}.")
        found[holders[0]].append(unit)
    for place, (names, stage) in enumerate(zip(parts, found, strict=True)):
        idle = [name for name in names if not any(_within(unit, name) for unit in stage)]
        if idle or not stage:
            raise PlanError(f"Stage {place} names {', '.join(map(repr, idle)) or 'nothing'}, {_no_unit(model, units)}")
        order = {unit.name: at for at, name in enumerate(names) for unit in stage if _within(unit, name)}
        stage.sort(key=lambda unit, order=order: order[unit.name])  # type: ignore[misc]
    return found


def _within(unit: Unit, name: str) -> bool:
    return unit.name == name or unit.name.startswith(f"{name}.") or name == ""


def _no_unit(model: nn.Module, units: Sequence[Unit]) -> str:
    return f"which is no module with parameters of {type(model).__name__}. It has {_told(units)}."


def _require_enough(model: nn.Module, units: Sequence[Unit], count: int) -> None:
    if len(units) < count:
        raise ModelError(
            f"{type(model).__name__} has {len(units)} units to put in stages ({_told(units)}), and the plan has "
            f"{count} stages. Write a smaller pp, or name modules inside of these: "
            'plugins=[pf.plugins.Pipeline(2, stages=["block.second"])].'
        )


def _told(units: Sequence[Unit]) -> str:
    return some_of([unit.name or "the model itself" for unit in units], most=12)
