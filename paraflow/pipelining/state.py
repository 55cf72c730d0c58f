"""What modules outside of the units keep, and what a step does to it: counters, statistics, queues, generators.

Code outside of the units runs on every stage, but for what comes after the stage's last layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from torch import Tensor, nn

from paraflow.pipelining.absent import Absent
from paraflow.pipelining.kept import MISSING, Kept, can_be_given, is_same_number, version_of
from paraflow.pipelining.values import tensors_kept_in

Place = tuple[str, str]
"""A module's name, and the name of its attribute or buffer."""

Look = Mapping[Place, tuple[Any, int]]
"""What is at each place, and how often it has been written into."""

_NEVER = frozenset([*nn.Module().__dict__, "_compiled_call_impl"])


class Kind(Enum):
    """What can be done with a value that another stage has written."""

    GIVEN = auto()
    OF_LAYERS = auto()  # depends on what layers compute: it is where it was computed
    OTHER = auto()  # an object that cannot be sent
    PREPARED = auto()  # an object where there was none: the trace has made it


@dataclass(frozen=True, slots=True)
class Written:
    """What a step writes at a place.

    Attributes:
        stage: The stage in which it is written last.
        kind: What it is.
    """

    stage: int
    kind: Kind


class ModuleState:
    """The attributes and buffers of modules outside of the units.

    Args:
        modules: The modules with their names. Modules of torch without buffers write nothing.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self._modules = {
            name: module
            for name, module in modules
            if module._buffers or not type(module).__module__.startswith("torch.nn.")
        }

    def items(self) -> Iterator[tuple[Place, Any]]:
        """Every place, with what is there."""
        for name, module in self._modules.items():
            for held in (module.__dict__, module._buffers):
                for leaf, value in held.items():
                    if leaf not in _NEVER and not leaf.startswith("_paraflow"):
                        yield (name, leaf), value

    def look(self) -> Look:
        """Returns what there is, at no cost; changes within lists do not show."""
        return {place: (value, version_of(value)) for place, value in self.items()}

    def get(self, place: Place) -> Any:
        """Returns what is at a place, or `MISSING`."""
        module, leaf = self._modules[place[0]], place[1]
        return module._buffers.get(leaf, MISSING) if leaf in module._buffers else module.__dict__.get(leaf, MISSING)

    def put(self, place: Place, value: Any) -> None:
        """Puts a value at a place; `MISSING` takes away what is there."""
        module, leaf = self._modules[place[0]], place[1]
        held: dict[str, Any] = module._buffers if leaf in module._buffers else module.__dict__
        if value is MISSING:
            held.pop(leaf, None)
        else:
            held[leaf] = value

    def is_buffer(self, place: Place) -> bool:
        """Whether a place is that of a buffer."""
        return place[1] in self._modules[place[0]]._buffers


class Watch:
    """Finds out what a step writes, and in which stage, and puts it back.

    Args:
        state: The modules' state.

    Attributes:
        written: What has been written.

    Example:
        >>> class Net(nn.Module):
        ...     calls = 0
        >>> net = Net()
        >>> watch = Watch(ModuleState([("", net)]))
        >>> net.calls += 1
        >>> watch.note(stage=2)
        >>> watch.written[("", "calls")].stage
        2
    """

    def __init__(self, state: ModuleState) -> None:
        self._state = state
        self._before = {place: Kept(value) for place, value in state.items()}
        self._last = dict(self._before)
        self.written: dict[Place, Written] = {}

    def note(self, stage: int) -> None:
        """Notes what has been written since the last time as written in a stage."""
        now = dict(self._state.items())
        for place in [*now, *(place for place in self._last if place not in now)]:
            value, last = now.get(place, MISSING), self._last.get(place)
            if last is None or last.differs(value):
                self._last[place] = Kept(value)
                self.written[place] = Written(stage, self._kind(place, value))

    def put_back(self) -> None:
        """Puts back what is known by value; an object that was made stays, as what a model prepares for itself does."""
        for place in self.written:
            now, before = self._state.get(place), self._before.get(place, _NOTHING).restored()
            if now is not before and (can_be_given(now) or has_absent(now)):
                self._state.put(place, before)

    def _kind(self, place: Place, value: Any) -> Kind:
        if has_absent(value):
            return Kind.OF_LAYERS
        if can_be_given(value):
            return Kind.GIVEN
        before = self._before.get(place, _NOTHING).value
        return Kind.PREPARED if before is None or before is MISSING else Kind.OTHER


_NOTHING = Kept(MISSING)


def has_absent(value: Any) -> bool:
    """Whether there is an absent tensor in what a module keeps, which may refer to itself."""
    if isinstance(value, Tensor):
        return isinstance(value, Absent)
    return any(isinstance(tensor, Absent) for tensor in tensors_kept_in(value))


def changed(before: Look, now: Look) -> list[Place]:
    """Returns the places at which something else is than was before."""
    every = [*now, *(place for place in before if place not in now)]
    return [place for place in every if _differs(before.get(place, _GONE), now.get(place, _GONE))]


_GONE = (MISSING, 0)


def _differs(before: tuple[Any, int], now: tuple[Any, int]) -> bool:
    return before[1] != now[1] if before[0] is now[0] else not is_same_number(before[0], now[0])
