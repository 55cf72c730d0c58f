"""From what was seen of each part of a forward to what each holds: memory that several hold is counted once."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from paraflow.planner.blocks import BlockProfile, Operation, Profile
from paraflow.profiler.operations import Call, Recording
from paraflow.recompute.operations import is_kept_always, may_be_kept


def profile_of(parts: Sequence[Recording], *, gradients_there: bool = True) -> Profile:
    """Returns what the parts of a forward hold and take.

    Args:
        parts: In the order of forward: one of what lies outside the blocks before, between and after calls of blocks.
        gradients_there: Whether parameters have gradients already when backward makes new ones, which are then there
            beside them; else those that backward makes are not counted.
    """
    accounts = _Accounts(parts, gradients_there)
    profiles = [accounts.of(index) for index in range(len(parts))]
    held = sum(size for key, size in accounts.returned.items() if key not in accounts.pinned)
    merged = _alike_made_even(_merged(profiles))
    if held:
        merged = [BlockProfile("", kept=held, whole=held), *merged]
    return Profile(tuple(merged), sum(part.seconds for part in merged))


class _Accounts:
    """Who holds what.

    A tensor is pinned by the first part that holds it whatever becomes of the blocks: one outside the blocks that keeps
    it, or a block whose input it is, and which needs it in backward.
    """

    def __init__(self, parts: Sequence[Recording], gradients_there: bool) -> None:
        self._parts = parts
        self._gradients_there = gradients_there
        self.pinned: dict[int, int] = {}
        for index, part in enumerate(parts):
            for key in part.saved:
                if not part.name or key in part.inputs:
                    self.pinned.setdefault(key, index)
        self._pending = _pending(parts, gradients_there)
        self.returned = {key: storage.nbytes() for key, storage in parts[-1].outputs.items()}

    def of(self, index: int) -> BlockProfile:
        part = self._parts[index]
        given = self._given(index)
        kept = sum(s.nbytes() for key, s in part.saved.items() if self._counts(key, index))
        always = self._operations(index, lambda call: is_kept_always(call.operator))
        operations = self._operations(index, lambda call: not is_kept_always(call.operator))
        return BlockProfile(
            part.name,
            kept=kept + sum(part.inner.values()),
            input=given + sum(op.bytes for op in always),
            whole=self._around(index) + self._whole(part) + sum(op.extra for op in always),
            shared=sum(s.nbytes() for key, s in part.inputs.items() if self._is_shared(key, index)),
            seconds=part.seconds,
            again=sum(op.seconds for op in operations),
            operations=operations,
            repeatable=not part.writes_inputs,
        )

    def _given(self, index: int) -> int:
        inputs = self._parts[index].inputs.items()
        return sum(storage.nbytes() for key, storage in inputs if self.pinned.get(key, index) >= index)

    def _around(self, index: int) -> int:
        """What is there all through a part's backward."""
        return self._given(index) + self._pending[index]

    def _counts(self, key: int, index: int) -> bool:
        """Whether memory that a part keeps is counted in it."""
        holder = self.pinned.get(key, index)
        return holder == index or (holder > index and not self._next_to(index, holder))

    def _next_to(self, index: int, holder: int) -> bool:
        """Whether no block lies between two parts: what the later holds is then there for the earlier as well."""
        return not any(part.name for part in self._parts[index + 1 : holder])

    def _is_shared(self, key: int, index: int) -> bool:
        return self.pinned.get(key) == index and any(key in part.saved for part in self._parts[:index])

    def _operations(self, index: int, choice: Callable[[Call], bool]) -> tuple[Operation, ...]:
        """Of a block's calls up to the last that backward needs, those that are chosen."""
        part = self._parts[index]
        calls = part.calls[: part.last_save] if part.name else []
        return tuple(self._operation(index, call) for call in calls if choice(call))

    def _operation(self, index: int, call: Call) -> Operation:
        part = self._parts[index]
        counted = {key: size for key, size in call.made.items() if key not in part.outputs or self._is_free(key, index)}
        needless = sum(s for key, s in counted.items() if key not in part.inner and key not in part.saved)
        keepable = any(call.made.values()) and not call.written and may_be_kept(call.operator)
        there = self._around(index) + self._there(call, part) if call.touched else 0
        return Operation(call.name, call.occurrence, call.seconds, sum(counted.values()), needless, there, keepable)

    def _is_free(self, key: int, index: int) -> bool:
        """Whether no later part holds what this one returned."""
        holder = self.pinned.get(key, index)
        return holder <= index or not self._next_to(index, holder)

    def _whole(self, part: Recording) -> int:
        """The most that is there at once in backward, besides the inputs.

        While backward is in a call, what was kept up to it is there, a gradient for each of its tensors, and, unless it
        is the last call, the gradient of the output, which may yet have another way to go.
        """
        kept = part.calls[-1].saved if part.calls else 0
        return max([kept, *(self._there(call, part) for call in part.calls if call.touched)])

    def _there(self, call: Call, part: Recording) -> int:
        """What is there while backward is in a call: what was kept up to it, and gradients."""
        last = next(other for other in reversed(part.calls) if other.touched)
        pending = sum(storage.nbytes() for storage in part.outputs.values()) if part.name and call is not last else 0
        return call.saved + call.touched - (0 if self._gradients_there else call.weights) + pending


def _pending(parts: Sequence[Recording], gradients_there: bool) -> list[int]:
    """Bytes of gradients that wait while backward is in each part.

    The gradient of what several parts read, such as a tied weight or a skip connection, is there from the last of them
    until the first has added its own.
    """
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    size: dict[int, int] = {}
    made: set[int] = set()
    for index, part in enumerate(parts):
        for key, count in part.reads.items():
            if key in made or key in part.parameters:
                first.setdefault(key, index)
                last[key], size[key] = index, max(count, size.get(key, 0))
        if part.name:
            made |= part.outputs.keys()
    waiting = [0] * len(parts)
    weights = set() if gradients_there else set().union(*(part.parameters for part in parts))
    for key, count in size.items():
        # A tied weight's gradient that is not counted is there twice when the second part of it is made.
        for index in range(first[key], first[key] + 1 if key in weights and last[key] > first[key] else last[key]):
            waiting[index] += count
    return waiting


def _merged(profiles: Sequence[BlockProfile]) -> list[BlockProfile]:
    """One profile a block: what a block's calls hold is added up at the place of the first."""
    calls: dict[str, list[BlockProfile]] = defaultdict(list)
    for profile in profiles:
        calls[profile.name].append(profile)
    merged, done = [], set()
    for profile in profiles:
        if not profile.is_block:
            if profile.kept or profile.whole or profile.seconds:
                merged.append(profile)
        elif profile.name not in done:
            done.add(profile.name)
            merged.append(_together(calls[profile.name]))
    return merged


def _together(calls: Sequence[BlockProfile]) -> BlockProfile:
    first = calls[0]
    if len(calls) == 1:
        return first
    kept = sum(call.kept for call in calls)
    return replace(
        first,
        kept=kept,
        input=sum(call.input for call in calls),
        whole=max(call.whole for call in calls),
        shared=sum(call.shared for call in calls),
        seconds=sum(call.seconds for call in calls),
        again=sum(call.again for call in calls),
        operations=_same_operations([call.operations for call in calls]),
        calls=len(calls),
        repeatable=all(call.repeatable for call in calls),
    )


def _same_operations(calls: Sequence[tuple[Operation, ...]]) -> tuple[Operation, ...]:
    """The operations that all calls of a block have, added up."""
    by_name = [{(op.name, op.occurrence): op for op in operations} for operations in calls]
    found = []
    for key in by_name[0]:
        same = [operations[key] for operations in by_name if key in operations]
        if len(same) == len(calls):
            found.append(
                Operation(
                    *key,
                    seconds=sum(op.seconds for op in same),
                    bytes=sum(op.bytes for op in same),
                    extra=sum(op.extra for op in same),
                    there=max(op.there for op in same),
                    keepable=all(op.keepable for op in same),
                )
            )
    return tuple(found)


def _alike_made_even(profiles: Sequence[BlockProfile]) -> list[BlockProfile]:
    """Gives blocks that are alike the median of their seconds: that one was slower was chance."""
    alike: dict[object, list[BlockProfile]] = defaultdict(list)
    for profile in profiles:
        alike[_kind(profile)].append(profile)
    return [_even(profile, alike[_kind(profile)]) if profile.is_block else profile for profile in profiles]


def _kind(profile: BlockProfile) -> object:
    operations = tuple((op.name, op.bytes) for op in profile.operations)
    return profile.is_block, profile.calls, profile.kept, profile.input, operations


def _even(profile: BlockProfile, alike: Sequence[BlockProfile]) -> BlockProfile:
    operations = tuple(
        replace(op, seconds=statistics.median(other.operations[place].seconds for other in alike))
        for place, op in enumerate(profile.operations)
    )
    return replace(
        profile,
        seconds=statistics.median(other.seconds for other in alike),
        again=statistics.median(other.again for other in alike),
        operations=operations,
    )
