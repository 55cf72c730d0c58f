"""What a step does to the modules outside of the units, alike on every rank, whatever stages a rank runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paraflow.errors import ModelError
from paraflow.mesh import Mesh
from paraflow.pipelining.kept import MISSING, Kept, contents_of, fill, is_number
from paraflow.pipelining.orders import Schedule
from paraflow.pipelining.replay import Replay
from paraflow.pipelining.state import Kind, Look, Place, Watch, changed
from paraflow.pipelining.trace import Traffic
from paraflow.pipelining.traces import LookedAt, Unread
from paraflow.pipelining.values import rebuilt


class StageState:
    """Has each stage of a rank go on from its own state, and gives what the last stage wrote to all ranks.

    A stage runs the code before its layers and between them, and so writes what that writes. What comes after the last
    layer of a rank it does not run: that is given to it at the end of the step, so that the state is then that of one
    process. A micro-batch begins before the one before it has come to its end, so what is written there cannot be read
    by earlier code in the same step.

    Args:
        replay: Runs the stages.
        mesh: The ranks.
        schedule: Which has which stage.
    """

    def __init__(self, replay: Replay, mesh: Mesh, schedule: Schedule) -> None:
        self._replay, self._state, self._mesh = replay, replay.state, mesh
        places = schedule.places
        self._source = places[-1]
        self._stages = schedule.stages_of(mesh.coordinate("pp"))
        self._last = len(places) - 1
        # From the stage after this one on, there is code that some rank does not run.
        self._common = min(max(schedule.stages_of(place)) for place in set(places))
        self._late: dict[Place, bool] = {}  # whether it is also read early
        self._known: set[Place] = set()
        self._begin: dict[Place, Kept] = {}
        self._before: dict[Place, Kept] = {}  # what no stage was known to write, when the step began
        self._of_stage: dict[int, dict[Place, Kept]] = {}
        self._left: Look | None = None

    def expect(self, traffic: Traffic, again: Callable[[], Any]) -> None:
        """Notes what a step writes; called with each new trace, alike on every rank.

        Args:
            traffic: The trace.
            again: Calls the step again, to be traced.

        Raises:
            ModelError: It writes, where some ranks do not come, what cannot be given to them.
        """
        for place, written in traffic.state.items():
            self._known.add(place)
            if written.stage > self._common and written.kind is Kind.OTHER:
                raise ModelError(
                    f"'{_name(place)}' is given an object after the layers of an earlier stage of the pipeline, whose "
                    "rank does not come to that line, and only numbers, tensors and containers of those can be sent "
                    "to it. Keep those, or write it before the first layer is called, which every rank comes to."
                )
            if written.stage > self._common and written.kind is Kind.GIVEN:
                self._late[place] = self._late.get(place, False) or self._is_read_early(place, again)

    def _is_read_early(self, place: Place, again: Callable[[], Any]) -> bool:
        """Whether code that every rank runs looks at what is at a place, when the step begins."""
        before = self._state.get(place)
        self._state.put(place, Unread())
        try:
            self._replay.trace(again)
        except (Exception, LookedAt):  # whatever comes of a step that finds what it does not know
            return self._replay.reached <= self._common
        finally:
            self._state.put(place, before)
        return False

    def require_settled(self, micro_batches: int) -> None:
        """Refuses a training step of several micro-batches in which one reads what the one before writes at its end.

        Raises:
            ModelError: There is such a thing.
        """
        read = [place for place, early in self._late.items() if early] if micro_batches > 1 else []
        if read:
            raise ModelError(
                f"'{_name(read[0])}' is written after the layers of an earlier stage of the pipeline, and is read "
                "before them: the next micro-batch comes to that line before this one has come to its end. Write it "
                "before the first layer is called, or write accumulate=1."
            )

    @contextmanager
    def step(self) -> Iterator[None]:
        """Runs a step: afterwards the state is the same on every rank. A collective along ``pp``, if it writes late."""
        self._of_stage = {}
        self._begin = {place: Kept(self._state.get(place)) for place in self._known} if self._several else {}
        self._before = self._kept_of_others() if self._several else {}
        moved, self._replay.moved = self._replay.moved, self._moved
        try:
            yield
        finally:
            self._replay.moved = moved
        self._put(max(self._stages))
        self._give()

    @contextmanager
    def stage(self, stage: int) -> Iterator[None]:
        """Runs a stage on a micro-batch: it goes on from what it wrote in the micro-batch before."""
        self._put(stage)
        self._left = None
        yield
        if stage == self._last:
            self._require_known()
        if self._several:
            for place in self._unforeseen():
                self._known.add(place)
                self._begin[place] = self._before.get(place, Kept(MISSING))
            self._of_stage[stage] = {place: Kept(self._state.get(place)) for place in self._known}

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Puts back what is written."""
        watch = Watch(self._state)
        try:
            yield
        finally:
            watch.note(self._last)
            watch.put_back()

    @property
    def _several(self) -> bool:
        return len(self._stages) > 1

    def _kept_of_others(self) -> dict[Place, Kept]:
        """What is at the places that no trace has shown to be written: a step may write there all the same."""
        found = {}
        for place, value in self._state.items():
            if place not in self._known:
                kept = self._before.get(place)
                # A copy of a tensor, such as a large mask, is good until torch has counted a write.
                is_good = kept is not None and isinstance(value, Tensor) and not kept.differs(value)
                found[place] = kept if kept is not None and is_good else Kept(value)
        return found

    def _unforeseen(self) -> list[Place]:
        """Where the stage that was run has written, and no trace or stage before had: also within lists and tensors."""
        now, nothing = dict(self._state.items()), Kept(MISSING)
        places = [*now, *(place for place in self._before if place not in now)]
        return [
            place
            for place in places
            if place not in self._known and self._before.get(place, nothing).differs(now.get(place, MISSING))
        ]

    def _put(self, stage: int) -> None:
        if self._several:
            for place, kept in {**self._begin, **self._of_stage.get(stage, {})}.items():
                self._state.put(place, kept.restored())

    def _moved(self, before: int, after: int) -> None:
        if before <= self._common < after:
            self._left = self._state.look()

    def _require_known(self) -> None:
        """Refuses what was written late in this run, and not when the step was traced."""
        if self._left is None or self._common == self._last:
            return
        for place in changed(self._left, self._state.look()):
            value = self._state.get(place)
            counts = self._state.is_buffer(place) or (is_number(value) and value is not None)
            if counts and place not in self._late:
                raise ModelError(
                    f"'{_name(place)}' is written after the layers of an earlier stage of the pipeline, and was not "
                    "when the step was traced on a micro-batch of the same shapes: the rank of that stage does not "
                    "know of it. Write it before the first layer is called, which every rank comes to."
                )

    def _give(self) -> None:
        if not self._late:
            return
        here = self._mesh.coordinate("pp") == self._source
        box = [[_sent(self._state.get(place)) for place in self._late] if here else None]
        device = self._mesh.device if self._mesh.device.type == "cuda" else None
        source = self._mesh.peer("pp", self._source)
        dist.broadcast_object_list(box, src=source, group=self._mesh.group("pp"), device=device)
        if here or box[0] is None:
            return
        for place, sent in zip(self._late, box[0], strict=True):
            self._take(place, sent)

    def _take(self, place: Place, sent: _Sent) -> None:
        content = rebuilt(sent.content, lambda one: one.tensor.to(self._mesh.device if one.away else "cpu"), _Packed)
        value = self._state.get(place)
        if sent.missing:
            content = MISSING
        if contents_of(value) is not None and type(value).__name__ == sent.kind and _shape(value) == _shape(content):
            fill(value, content)  # others may hold it as well
        else:
            self._state.put(place, content)


@dataclass(frozen=True, slots=True)
class _Packed:
    """A tensor on the host, and whether it comes from a device."""

    tensor: Tensor
    away: bool


@dataclass(frozen=True, slots=True)
class _Sent:
    """A value on its way to other ranks."""

    content: Any
    kind: str
    missing: bool


def _sent(value: Any) -> _Sent:
    content = contents_of(value)
    plain = value if content is None else content
    packed = rebuilt(
        None if value is MISSING else plain,
        lambda tensor: _Packed(tensor.detach().cpu(), away=tensor.device.type != "cpu"),
        torch.Tensor,
    )
    return _Sent(packed, type(value).__name__, value is MISSING)


def _shape(value: Any) -> Any:
    return getattr(value, "shape", None)


def _name(place: Place) -> str:
    return ".".join(part for part in place if part)
