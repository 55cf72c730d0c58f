"""Parameters that several stages use: each of them holds a copy, and all copies stay the same."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import nn

from paraflow.collectives import add_up, broadcast
from paraflow.collectives.overlapped import marks_of_use, take_from_others
from paraflow.errors import PlanError
from paraflow.mesh import Mesh
from paraflow.parts import local
from paraflow.pipelining.cut import Cut

Places = tuple[int, ...]

_BUCKET_BYTES = 25 * 2**20


def users_of(model: nn.Module, cut: Cut, mentioned: Collection[str], shared: Sequence[str] = ()) -> dict[str, Places]:
    """Returns the stages that use each parameter, by its first name.

    A parameter of units is used by their stages, and by the last one if code between units mentions it. What belongs to
    no unit is used by all stages, for what uses it may run on any.

    Args:
        model: The whole model.
        cut: Its stages.
        mentioned: Parameters of units that code between units uses by itself (`weights_used_by_glue`).
        shared: Names, or patterns of names, of parameters that all stages use.

    Raises:
        PlanError: A pattern of `shared` fits no parameter.

    Example:
        >>> from paraflow.pipelining.cut import cut
        >>> net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
        >>> net[2].weight = net[0].weight
        >>> users_of(net, cut(net, 3), mentioned=[])
        {'0.weight': (0, 2), '1.weight': (1,), '1.bias': (1,)}
    """
    last = len(cut.stages) - 1
    used: dict[int, set[int]] = {}
    for place, stage in enumerate(cut.stages):
        for unit in stage:
            for parameter in unit.module.parameters():
                used.setdefault(id(parameter), set()).add(place)
    every = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    for name in mentioned:
        used[every[name]].add(last)
    for pattern in shared:
        fitting = [key for name, key in every.items() if fnmatchcase(name, pattern)]
        if not fitting:
            raise PlanError(f"shared names {pattern!r}, and {type(model).__name__} has no such parameter.")
        for key in fitting:
            used[key] = set(range(last + 1))
    return {name: tuple(sorted(used.get(id(p), range(last + 1)))) for name, p in model.named_parameters()}


class Ties:
    """The parameters that ranks along ``pp`` hold copies of.

    Args:
        model: The model of this rank, already without what other stages hold.
        mesh: The ranks: making it is a collective of the world.
        holders: The places along ``pp`` that hold each parameter of the whole model, by name; alike on every rank.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, holders: Mapping[str, Places]) -> None:
        self._mesh = mesh
        self._holders = {name: places for name, places in holders.items() if len(places) > 1}
        self._model = model
        here = mesh.coordinate("pp")
        groups = {places: self._group(places) for places in sorted(set(self._holders.values()))}
        self._groups = {places: group for places, group in groups.items() if group is not None and here in places}

    def _group(self, places: Places) -> dist.ProcessGroup | None:
        whole = len(places) == self._mesh.degree("pp")
        return self._mesh.group("pp") if whole else self._mesh.group_of_places("pp", places)

    def counted_here(self, name: str) -> bool:
        """Whether this rank counts a parameter in sums over all: the first of those that hold it does."""
        places = self._holders.get(name)
        return places is None or places[0] == self._mesh.coordinate("pp")

    def is_shared(self, name: str) -> bool:
        """Whether several ranks hold a parameter."""
        return name in self._holders

    def give_values(self) -> None:
        """Gives the first holder's values to the others, where there are values yet."""
        for parameters, group in self._shared():
            broadcast([local(p) for p in parameters if not p.is_meta], group, _BUCKET_BYTES)

    def add_up(self) -> None:
        """Adds up the gradients of all holders; a parameter that none of them used has none afterwards, either."""
        for parameters, group in self._shared():
            trained = [p for p in parameters if p.requires_grad]
            if not trained:
                continue
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
            marks = marks_of_use(trained, self._mesh.device)
            add_up([*map(local, gradients), marks], group, _BUCKET_BYTES)
            take_from_others(trained, gradients, marks)

    def _shared(self) -> Iterator[tuple[list[nn.Parameter], dist.ProcessGroup]]:
        for places, group in self._groups.items():
            names = [name for name, holders in self._holders.items() if holders == places]
            yield [self._model.get_parameter(name) for name in names], group
