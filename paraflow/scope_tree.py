"""The scopes of one model: which there are, what is in each, and whether they can stand together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from paraflow.errors import PlanError
from paraflow.scopes import Kind, Scope, scopes_of_tensors


@dataclass(frozen=True)
class Scopes:
    """The scopes of one model.

    Attributes:
        model: The model's class, for what is said of it.
        parameters: The innermost scope of each parameter, by name; None where no scope covers it.
        tensors: The same of parameters, and of buffers that are saved, in the model's order.
        modules: The model's modules by name.
    """

    model: str
    parameters: Mapping[str, Scope | None]
    tensors: Mapping[str, Scope | None]
    modules: Mapping[str, nn.Module]

    @classmethod
    def of(cls, model: nn.Module) -> Scopes:
        """Reads the scopes of a model.

        Raises:
            PlanError: They cannot stand together in one model.
        """
        marks = scopes_of_tensors(model)
        parameters: dict[str, Scope | None] = {}
        tensors: dict[str, Scope | None] = {}
        modules = dict(model.named_modules())
        for path, module in modules.items():
            prefix = f"{path}." if path else ""
            own = {prefix + name: marks.get(prefix + name) for name, p in module._parameters.items() if p is not None}
            saved = [name for name, b in module._buffers.items() if b is not None]
            held = {prefix + n: marks.get(prefix + n) for n in saved if n not in module._non_persistent_buffers_set}
            parameters.update(own)
            tensors.update({**own, **held})
        scopes = cls(type(model).__name__, parameters, tensors, modules)
        _require_together(scopes)
        return scopes

    def __bool__(self) -> bool:
        return any(self.parameters.values())

    def all(self, kind: Kind) -> list[Scope]:
        """Returns the scopes of a kind that hold a parameter, in the order in which they were opened."""
        inner = [scope.inside(kind) for scope in self.parameters.values() if scope is not None]
        return sorted({scope for scope in inner if scope is not None}, key=_place)

    @property
    def stages(self) -> list[Scope]:
        """The stages of the model's pipeline, in order."""
        return self.all("stage")

    @property
    def joint_splits(self) -> list[Scope]:
        """The splits whose ranks share one batch: tensor parallelism."""
        beside = self.splits_beside
        return [scope for scope in self.all("split") if scope not in beside]

    @property
    def splits_beside(self) -> list[Scope]:
        """The splits that stand beside replicas, so that their ranks bring different samples."""
        outermost = [scope for scope in self.all("split") if scope.parent is None]
        covers_all = all(scope is not None and scope.outermost.kind == "split" for scope in self.parameters.values())
        return [] if covers_all else outermost

    def modules_in(self, scopes: list[Scope]) -> tuple[str, ...]:
        """Returns the names of the largest modules of which every parameter is in one of some scopes.

        Raises:
            PlanError: A parameter in them belongs to a module that is not.
        """
        inside = {name: any(own is not None and own.within(s) for s in scopes) for name, own in self.parameters.items()}
        found = tuple(name for name, _ in self._largest(inside))
        for name in (name for name, is_inside in inside.items() if is_inside):
            if not any(name.startswith(f"{module}.") for module in found) and "" not in found:
                raise PlanError(
                    f"{name} is made in a split scope, and the module that has it is not. Only whole modules are "
                    "split; make it the parameter of a module of its own, or take it out of the scope."
                )
        return found

    def modules_of_stages(self) -> tuple[tuple[str, ...], ...]:
        """Returns for each stage the names of its modules, the largest that are wholly in it.

        What no stage covers joins the stage of what is before it in the model, or the first one.
        """
        places = {stage: place for place, stage in enumerate(self.stages)}
        from paraflow.pipelining.cut import units_of

        current, of = 0, {}
        for name, scope in self.tensors.items():
            stage = None if scope is None else scope.inside("stage")
            current = current if stage is None else places[stage]
            of[name] = current
        found = dict(self._largest(of, also_the_whole=False))
        units = [unit.name for unit in units_of(self.modules[""], tuple(found))]
        stages: list[list[str]] = [[] for _ in places]
        for name, place in found.items():
            if any(unit == name or unit.startswith(f"{name}.") for unit in units):  # else it is never called
                stages[place].append(name)
        return tuple(tuple(names) for names in stages)

    def _largest(self, of: Mapping[str, Any], also_the_whole: bool = True) -> Iterator[tuple[str, Any]]:
        """The largest modules for whose parameters something is the same, and true."""
        done: list[str] = []
        for name in self.modules:
            if any(name.startswith(prefix) for prefix in done) or (not name and not also_the_whole):
                continue
            prefix = f"{name}." if name else ""
            values = {value for tensor, value in of.items() if tensor.startswith(prefix)}
            if len(values) == 1 and (value := values.pop()) is not False:
                done.append(prefix)
                yield name, value


def _require_together(scopes: Scopes) -> None:
    kinds = {scope.kind for scope in scopes.parameters.values() if scope is not None}
    if "auto_parallel" in kinds and len(kinds) > 1:
        others = ", ".join(sorted(kinds - {"auto_parallel"}))
        raise PlanError(
            f"{scopes.model} has auto_parallel() beside {others}; it lays out a whole model by itself. Leave out the "
            "one or the other."
        )
    pipelines = scopes.all("pipeline")
    if len(pipelines) > 1:
        raise PlanError(
            f"{scopes.model} has {len(pipelines)} pipelines; a model has one. Open all stages in one pipeline()."
        )
    if pipelines and len(scopes.stages) < 2:
        raise PlanError(
            f"The pipeline of {scopes.model} has {len(scopes.stages)} stages with parameters; it needs two or more. "
            "Open a stage() around each part, or leave the pipeline out and write Trainer(pp=...), which cuts the "
            "model by itself."
        )
    if pipelines and any(scope.parent is None for scope in scopes.all("split")):
        raise PlanError(
            f"{scopes.model} has a split beside a pipeline, so its layers belong to no stage. Open the split in a "
            "stage: pipeline{stage, stage{split}}."
        )
    _require_one_split(scopes)


def _require_one_split(scopes: Scopes) -> None:
    counts = sorted({scope.devices for scope in scopes.joint_splits if scope.devices is not None})
    if len(counts) > 1:
        raise PlanError(
            f"{scopes.model} has splits over {counts} ranks; all layers of a model that are split are split over as "
            f"many. Write split({counts[-1]}) in each."
        )
    if scopes.joint_splits and scopes.splits_beside:
        raise PlanError(
            f"{scopes.model} has a split in a replica, over ranks that share a batch, and one beside, over ranks with "
            "batches of their own. Write all of one kind."
        )


def _place(scope: Scope) -> tuple[int, ...]:
    """Where a scope was opened, for their order."""
    if scope.parent is None:
        return ()
    return (*_place(scope.parent), next(i for i, child in enumerate(scope.parent.children) if child is scope))
