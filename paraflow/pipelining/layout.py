"""Puts a rank's stages in place: cuts the model, notes what it was, and leaves only what the rank runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paraflow.errors import ModelError
from paraflow.outline import Outline, outline_of
from paraflow.pipelining.cut import Cut, Stages, cut, units_of
from paraflow.pipelining.glue import glue_time, weights_used_by_glue
from paraflow.pipelining.hollow import hollow
from paraflow.pipelining.replay import Replay
from paraflow.pipelining.ties import Places, users_of

if TYPE_CHECKING:
    from paraflow.mesh import Mesh
    from paraflow.pipelining.orders import Schedule

_ATTRIBUTE = "_paraflow_layout"


@dataclass(frozen=True)
class Layout:
    """A model in stages, as one rank has it.

    Attributes:
        cut: The stages.
        users: The stages that use each parameter of the whole model, by its first name.
        outline: What the whole model has.
        replay: Runs a stage's part of a step.
        asked: How the model was to be laid out.
    """

    cut: Cut
    users: Mapping[str, Places]
    outline: Outline
    replay: Replay
    asked: tuple[Any, ...]

    def __deepcopy__(self, memo: object) -> None:
        """A copy of the model has this rank's weights, and does not run."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def holders(self, places: Sequence[int]) -> dict[str, Places]:
        """Returns which places along ``pp`` hold each parameter.

        Args:
            places: The place of each stage.
        """
        return {name: tuple(sorted({places[stage] for stage in stages})) for name, stages in self.users.items()}

    def require_weights(self, used: Mapping[str, frozenset[int]]) -> None:
        """Refuses weights that a stage uses and does not have.

        Args:
            used: The stages that use a parameter outside of its unit, by name, as a trace has found out.

        Raises:
            ModelError: There are some.
        """
        for name, stages in used.items():
            first = self.outline.first_name(name)
            lacking = sorted(stages - set(self.users.get(first, stages)))
            if lacking:
                raise ModelError(
                    f"{name} is used outside of its own module, by stage {lacking[0]} of the pipeline, which does not "
                    f"hold it. Have all stages hold it: plugins=[pf.plugins.Pipeline(..., shared=[{first!r}])]."
                )


def lay_out(
    model: nn.Module,
    schedule: Schedule,
    place: int,
    device: torch.device,
    *,
    stages: Stages | None = None,
    costs: Mapping[str, float] | None = None,
    shared: Sequence[str] = (),
    most_bytes: float = math.inf,
) -> Layout:
    """Lays a model out in stages, and takes out of it what other ranks have.

    A model that has been laid out in the same way by an earlier run stays as it is.

    Args:
        model: The model; it may be without memory.
        schedule: Which place has which stage.
        place: This rank's place along ``pp``.
        device: The device it will be on.
        stages: What belongs to each stage, or begins it (`cut`).
        costs: The time of each unit (`cut`).
        shared: Parameters that all stages hold, by pattern.
        most_bytes: The bytes of parameters that a stage may have (`cut`).

    Raises:
        ModelError: It was laid out in another way, or has too few units.
        PlanError: What was asked for does not fit it.
    """
    asked = (schedule.places, place, stages, costs, tuple(shared), most_bytes)
    known: Layout | None = model.__dict__.get(_ATTRIBUTE)
    if known is not None or outline_of(model) is not None:
        if known is None or known.asked != asked:
            raise ModelError(
                f"{type(model).__name__} has been cut in other stages by an earlier Trainer, and this rank has only "
                "some of it. Use the same plan, or make the model anew and load its state."
            )
        return known
    mentioned = weights_used_by_glue(model, units_of(model))
    glue = glue_time(model, mentioned)
    parts = cut(model, schedule.stages, stages=stages, costs=costs, glue=glue, most_bytes=most_bytes)
    outline = Outline.of(model)
    outline.units = tuple(name for stage in parts.names for name in stage)
    users = users_of(model, parts, mentioned, shared)
    layout = Layout(parts, users, outline, Replay(model, parts.names, device), asked)
    holders = layout.holders(schedule.places)
    hollow(model, parts, schedule.stages_of(place), [name for name, places in holders.items() if place in places])
    model.__dict__[_ATTRIBUTE] = layout
    return layout


def agreed_costs(
    mesh: Mesh, costs: Mapping[str, float] | None, arguments: Mapping[str, Any]
) -> Mapping[str, float] | None:
    """Returns rank 0's costs on every rank, for each may have measured its own. A collective of the world.

    Args:
        mesh: The ranks.
        costs: This rank's costs.
        arguments: What else decides how a model is cut, by name: alike on every rank.

    Raises:
        ModelError: They differ; raised on every rank.
    """
    said = [json.loads(text) for text in mesh.gather_texts(json.dumps([costs, arguments], default=float))]
    first = said[0][1]
    for rank, (_, given) in enumerate(said):
        for name, value in given.items():
            if value != first.get(name):
                raise ModelError(
                    f"The ranks were given different pipelines: rank 0 has {name}={first.get(name)!r}, and rank {rank} "
                    f"has {name}={value!r}. Give Pipeline the same arguments on every rank."
                )
    agreed: Mapping[str, float] | None = said[0][0]
    return agreed


def laid_out_alike(mesh: Mesh, lay: Callable[[], Layout]) -> Layout:
    """Lays a model out, and makes sure that every rank has cut it in the same stages. A collective of the world.

    Args:
        mesh: The ranks.
        lay: Lays the model out (`lay_out`).

    Raises:
        ModelError: Ranks have cut it otherwise, or could not: raised on every rank.
    """
    layout, failure = None, None
    try:
        layout = lay()
    except Exception as error:  # the others wait for what this rank says
        failure = error
    said = mesh.gather_texts(json.dumps(None if layout is None else layout.cut.names))
    if failure is not None:
        raise failure
    assert layout is not None, "It failed otherwise."
    other = next((rank for rank, text in enumerate(said) if text != said[0]), None)
    if other is not None:
        first, second = (_in_words(json.loads(said[rank])) for rank in (0, other))
        raise ModelError(
            f"The ranks have cut the model in different stages: rank 0 {first}, and rank {other} {second}. Each layer "
            "must be on one rank. Build the same model on every rank, or write the stages out: "
            "plugins=[pf.plugins.Pipeline(..., stages=[['embedding', 'blocks.0'], ['blocks.1', 'head']])]."
        )
    return layout


def _in_words(names: Sequence[Sequence[str]] | None) -> str:
    if names is None:
        return "raised an error"
    return "has " + " | ".join(" ".join(stage) for stage in names)
