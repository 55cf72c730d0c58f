"""A look at a user's step in which no layer computes: which values cross from stage to stage.

Every call that depends on what a layer gives, or on a weight, is numbered. The numbers are the same on all ranks and in
every run, and so is what each call returns, but for the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from paraflow.errors import ModelError
from paraflow.pipelining.absent import (
    METADATA,
    READING,
    Absent,
    Key,
    Meta,
    Slot,
    at_line,
    outlived,
    slot_of,
    unreadable,
    unseen,
)
from paraflow.pipelining.functions import Drawing, aside, is_custom
from paraflow.pipelining.kept import version_of
from paraflow.pipelining.skeleton import Skeleton
from paraflow.pipelining.state import Place, Written
from paraflow.pipelining.values import rebuilt, tensors_in
from paraflow.recompute.generators import GLOBAL_GENERATORS


@dataclass(frozen=True, slots=True)
class Given:
    """A result that is one of the tensors that the call was given: which one of them."""

    index: int


@dataclass(frozen=True, slots=True)
class Write:
    """That a call wrote into a tensor made of the batch, which from then on depends on layers.

    Attributes:
        index: Which of the tensors given to the call it is.
        slot: The value that it is now.
        base: Whether it is the tensor that the given one is a view of.
    """

    index: int
    slot: Slot
    base: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """A numbered call: of a function outside of the units, or of a unit.

    Attributes:
        name: The function or unit.
        result: What it returned, with a `Slot` or `Given` for each tensor.
        writes: What it wrote into.
        draws: Whether it may draw random numbers of torch, which are then its stage's own.
        draws_others: Whether it draws from numpy's or Python's generators.
    """

    name: str
    result: Any
    writes: tuple[Write, ...] = ()
    draws: bool = True
    draws_others: bool = False


@dataclass(frozen=True)
class Traffic:
    """What crosses between the stages of a pipeline in one micro-batch.

    Attributes:
        crossing: What goes from stage s to stage s + 1, also what only passes through, for each s but the last.
        returned: What the step returns, with a `Meta` for each tensor.
        slots: The values that `crossing` describes.
        events: The numbered calls, in order.
        written: For each stage, what it receives and writes into.
        weights: For each parameter or buffer that is used by calls outside of units, or given to units, the stages.
        writes_batch: Whether the step writes into tensors of the batch, so that each run of it takes a copy.
        state: What the step writes into modules outside of the units.
    """

    crossing: tuple[tuple[Meta, ...], ...]
    returned: Any
    slots: tuple[tuple[Slot, ...], ...] = field(repr=False, compare=False)
    events: tuple[Event, ...] = field(repr=False, compare=False)
    written: tuple[frozenset[Key], ...] = field(repr=False, compare=False)
    weights: Mapping[str, frozenset[int]] = field(repr=False, compare=False)
    writes_batch: bool = False
    state: Mapping[Place, Written] = field(default_factory=dict, repr=False, compare=False)


class Glue(TorchFunctionMode):
    """Sees every call of a torch function outside of the units.

    Attributes:
        stage: The stage that the step is in: that of the unit called last.
        inside: Whether a unit runs, or a function: what they call is not seen.
        number: The number of the next call.
        ghosts: Tensors made of the batch that another stage wrote into: what they are.
        run: What absent tensors of this run have in common.
        moved: Called before the step goes from one stage to a later one.
    """

    watches_glue = True  # what compares a module with another run of it asks this: there it cannot

    def __init__(self) -> None:
        super().__init__()
        self.stage = 0
        self.inside = False
        self.number = 0
        self.run = object()
        self.moved: Callable[[int, int], None] = lambda before, after: None
        self.ghosts: MutableMapping[Tensor, Absent] = WeakTensorKeyDictionary()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = tuple(args), dict(kwargs or {})
        if func in METADATA:
            return func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        if not any(self.depends(tensor) for tensor in given):
            return self.plain(func, args, kwargs)
        name = getattr(func, "__name__", str(func))
        if name in READING:
            raise unreadable(name)
        before, self.inside = self.inside, True
        try:
            return self.event(name, func, args, kwargs, given)
        finally:
            self.inside = before

    def move_to(self, stage: int) -> None:
        """Notes that a unit of a stage is called."""
        if stage > self.stage:
            self.moved(self.stage, stage)
            self.stage = stage

    def custom_function(self, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Sees the call of a custom autograd function, as `__torch_function__` sees those of torch."""
        if self.inside:
            return apply(*args, **kwargs)
        with aside(self):
            return self.__torch_function__(apply, (), args, kwargs)

    def depends(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on weights or on what units gave."""
        return isinstance(tensor, (Absent, nn.Parameter)) or (bool(self.ghosts) and tensor in self.ghosts)

    def plain(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call that depends on the batch only."""
        return func(*args, **kwargs)

    def event(
        self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]
    ) -> Any:
        """Runs a call that is numbered."""
        raise NotImplementedError

    def enter_unit(self, name: str, stage: int, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs the call of a unit."""
        raise NotImplementedError

    def absent_or(self, tensor: Tensor) -> Tensor:
        """Returns the absent tensor that another stage's writing made of one, or the tensor itself."""
        if isinstance(tensor, Absent) or not self.ghosts:
            return tensor
        return self.ghosts.get(tensor, tensor)

    def filled(self, template: Any, given: Sequence[Tensor]) -> Any:
        """Returns what a call returns: absent tensors, and those that it was given."""

        def fill(leaf: Slot | Given) -> Tensor:
            return given[leaf.index] if isinstance(leaf, Given) else Absent.like(leaf, self.run)

        return rebuilt(template, fill, (Slot, Given))


class Tracing(Glue):
    """Runs a step with all layers absent.

    Args:
        skeleton: What the layers return.
        stages: How many stages there are.
    """

    def __init__(self, skeleton: Skeleton, stages: int) -> None:
        super().__init__()
        self._skeleton = skeleton
        self._stages = stages
        self._fakes: dict[Key, Tensor] = {}
        self._slots: dict[Key, Slot] = {}
        self._made: dict[Key, int] = {}
        self._last: dict[Key, int] = {}
        self._writes: list[tuple[int, int]] = []  # stage, storage
        self._events: list[Event] = []
        self._weights: dict[str, set[int]] = {}
        self._unit = ""
        self._own: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()  # made in the step, of the batch
        self._writes_batch = False

    def enter_unit(self, name: str, stage: int, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns what a unit returns, absent."""
        if stage < self.stage:
            raise ModelError(
                f"'{name}' belongs to stage {stage} of the pipeline, and is called after '{self._unit}' of stage "
                f"{self.stage}{at_line()}. List the units of the stages in the order in which the forward calls them."
            )
        self.move_to(stage)
        self._unit = name
        return self._noted(name, self._skeleton.unit(name), args, kwargs, tensors_in((args, kwargs)))

    def plain(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call that depends on the batch only, and notes whether it writes into the batch."""
        given = [tensor for tensor in tensors_in((args, kwargs)) if not tensor.is_inference()]
        versions = [tensor._version for tensor in given]
        result = func(*args, **kwargs)
        changed = [t for t, version in zip(given, versions, strict=True) if t._version != version]
        self._writes_batch |= any(tensor not in self._own for tensor in changed)
        for tensor in tensors_in(result):
            base = tensor if tensor._base is None else tensor._base
            if all(tensor is not other for other in given) and (base is tensor or base in self._own):
                self._own[tensor] = None
        return result

    def event(
        self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]
    ) -> Any:
        """Finds out what a call returns, and what it uses."""
        drawing = Drawing(seen=is_custom(func))  # what a custom function does in it is not known
        return self._noted(name, partial(self._without_values, name, func, drawing), args, kwargs, given, drawing)

    def _noted(
        self,
        name: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[Tensor],
        drawing: Drawing | None = None,
    ) -> Any:
        if torch.is_inference_mode_enabled():  # in which torch counts no writes
            with torch.inference_mode(False), torch.no_grad():
                return self._noted(name, func, args, kwargs, given, drawing)
        fakes = [self._used(tensor) for tensor in given]
        versions = [version_of(fake) for fake in fakes]
        by_id = {id(tensor): fake for tensor, fake in zip(given, fakes, strict=True)}
        given_args, given_kwargs = rebuilt((args, kwargs), lambda tensor: by_id[id(tensor)])
        of_users = drawing is None or drawing.seen  # code that may draw with any generator
        others = GLOBAL_GENERATORS.read() if of_users else None
        result = func(*given_args, **given_kwargs)
        draws_others = others is not None and GLOBAL_GENERATORS.read() != others
        changed = [i for i, fake in enumerate(fakes) if version_of(fake) != versions[i]]
        writes = self._written(changed, given, fakes)
        places = {id(fake): i for i, fake in enumerate(fakes)}
        count = iter(range(1 << 30))

        def keep(leaf: Tensor) -> Slot | Given:
            if id(leaf) in places:
                return Given(places[id(leaf)])
            return self._new((self.number, next(count)), leaf)

        template = rebuilt(result, keep)
        draws = drawing is None or drawing.seen
        self._events.append(Event(name, template, writes, draws, draws_others))
        self.number += 1
        return self.filled(template, given)

    def _without_values(
        self, name: str, func: Callable[..., Any], drawing: Drawing, /, *args: Any, **kwargs: Any
    ) -> Any:
        from torch._subclasses import fake_tensor

        unknowable = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)
        try:
            with self._skeleton.mode, drawing:
                return func(*args, **kwargs)
        except unknowable as error:
            raise unreadable(name) from error

    def _new(self, key: Key, fake: Tensor) -> Slot:
        self._fakes[key] = fake
        self._made[key] = self.stage
        self._slots[key] = slot_of(fake, key)
        return self._slots[key]

    def _used(self, tensor: Tensor, stage: int | None = None) -> Tensor:
        """Notes that a tensor is used, and returns one that stands for it."""
        tensor = self.absent_or(tensor)
        if not isinstance(tensor, Absent):
            fake: Tensor = self._skeleton.mode.from_tensor(tensor)
            return fake
        if tensor.owner is not None and tensor.owner is not self.run:
            raise outlived(tensor)
        key = tensor.slot.key
        stage = self.stage if stage is None else stage
        if isinstance(key, str):
            self._weights.setdefault(key, set()).add(stage)
            return self._skeleton.weight(key)
        with torch._C.DisableTorchFunctionSubclass():
            if tensor.grad_fn is not None:
                raise unseen("A custom autograd function")
        self._last[key] = max(stage, self._last.get(key, 0))
        return self._fakes[key]

    def _written(self, changed: list[int], given: list[Tensor], fakes: list[Tensor]) -> tuple[Write, ...]:
        """What a call wrote into; what was made of the batch depends on layers from then on."""
        writes: list[Write] = []
        for i in changed:
            tensor, fake = self.absent_or(given[i]), fakes[i]
            if isinstance(tensor, Absent):
                self._writes.append((self.stage, _storage(fake)))
                continue
            self._writes_batch |= tensor not in self._own
            bases = [(tensor, fake, False)]
            if tensor._base is not None and fake._base is not None:
                bases.append((tensor._base, fake._base, True))
            for real, stand_in, base in bases:
                slot = self._new((self.number, -1 - len(writes)), stand_in)
                self.ghosts[real] = Absent.like(slot, self.run)
                writes.append(Write(i, slot, base))
        return tuple(writes)

    def finish(self, returned: Any) -> Traffic:
        """Returns what crosses, once the step has returned."""
        last = self._stages - 1
        for tensor in tensors_in(returned):
            if self.depends(tensor):
                self._used(tensor, last)
        slots = tuple(
            tuple(
                slot
                for key, slot in self._slots.items()
                if self._made[key] <= stage < self._last.get(key, self._made[key])
            )
            for stage in range(last)
        )

        def meta(tensor: Tensor) -> Meta:
            tensor = self.absent_or(tensor)
            return tensor.slot.meta if isinstance(tensor, Absent) else slot_of(tensor, "").meta

        return Traffic(
            crossing=tuple(tuple(slot.meta for slot in crossing) for crossing in slots),
            returned=rebuilt(returned, meta),
            slots=slots,
            events=tuple(self._events),
            written=self._received_and_written(slots),
            weights={name: frozenset(stages) for name, stages in self._weights.items()},
            writes_batch=self._writes_batch,
        )

    def _received_and_written(self, slots: tuple[tuple[Slot, ...], ...]) -> tuple[frozenset[Key], ...]:
        """For each stage, what it receives and writes into: copied there, for autograd writes into no leaf.

        Raises:
            ModelError: What is written into shares memory with another value that was received.
        """
        found: list[frozenset[Key]] = [frozenset()]
        for stage, crossing in enumerate(slots, start=1):
            storages = [_storage(self._fakes[slot.key]) for slot in crossing]
            written = {storage for at, storage in self._writes if at == stage}
            if any(storages.count(storage) > 1 for storage in written):
                raise ModelError(
                    f"Stage {stage} of the pipeline writes in place into a tensor of an earlier stage of which it also "
                    "uses another view. Write x = x + y instead of x += y there, or make a copy first (x.clone())."
                )
            keys = (slot.key for slot, storage in zip(crossing, storages, strict=True) if storage in written)
            found.append(frozenset(keys))
        return tuple(found)


def target_of(given: Tensor, write: Write) -> Tensor:
    """Returns the tensor that a call wrote into."""
    return given._base if write.base and given._base is not None else given


def _storage(fake: Tensor) -> int:
    return int(fake.untyped_storage()._cdata)
