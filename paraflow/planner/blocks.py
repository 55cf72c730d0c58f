"""What is known of a model's blocks: what backward needs of each, and what computing it again takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Operation:
    """One operator call in a block's forward, whose output can be kept while the rest is computed again.

    Attributes:
        name: The operator, such as ``"aten.addmm.default"``.
        occurrence: Which of the operator's calls in the block's forward it is, from 0.
        seconds: What the call takes.
        bytes: What keeping its output takes; 0 where it is the input of what follows, which is there in any case.
        extra: The part of `bytes` that backward does not need: it is kept in vain.
        there: Bytes that are there at once while backward is in it, when all that it needs is back.
        keepable: Whether its output can stand for the call: it is a tensor of its own, and no later operation writes
            to it.
    """

    name: str
    occurrence: int
    seconds: float
    bytes: int
    extra: int = 0
    there: int = 0
    keepable: bool = True


@dataclass(frozen=True)
class BlockProfile:
    """What backward needs of one block, or of what lies between two blocks, for one micro-batch.

    A tensor that two blocks hold is counted once: in the one that needs it whatever becomes of the other, which for a
    tensor between two blocks is the later one, whose input it is.

    Attributes:
        name: The block's name in the model; empty for what lies outside the blocks.
        kept: Bytes that forward keeps for backward.
        input: Bytes of its inputs, and of outputs that are never computed again: what stays in any case.
        whole: Bytes that are there at once during its backward, when all that it needs is back: `kept`, its output if
            that is needed, and the gradients on the way.
        shared: Bytes of its inputs that what lies before it holds as well.
        seconds: Of its forward, over all its calls.
        again: Seconds of what is computed again: forward up to the last tensor that backward needs.
        operations: The calls that `again` is made of.
        calls: How often a forward calls it.
        repeatable: Whether it can be run again: it does not change its inputs.
    """

    name: str
    kept: int
    input: int = 0
    whole: int = 0
    shared: int = 0
    seconds: float = 0.0
    again: float = 0.0
    operations: tuple[Operation, ...] = ()
    calls: int = 1
    repeatable: bool = True

    @property
    def is_block(self) -> bool:
        """Whether it can be treated; what lies outside the blocks is kept."""
        return bool(self.name)


@dataclass(frozen=True)
class Profile:
    """A model's parts in the order of forward: its blocks, and what lies between them.

    Attributes:
        parts: The parts; those without a name lie outside the blocks.
        seconds: Of the whole forward.
    """

    parts: tuple[BlockProfile, ...]
    seconds: float

    @property
    def blocks(self) -> tuple[BlockProfile, ...]:
        """The parts that can be treated."""
        return tuple(part for part in self.parts if part.is_block)

    @property
    def outside(self) -> int:
        """Bytes that what lies outside the blocks keeps: embeddings, the head, the loss."""
        return sum(part.kept for part in self.parts if not part.is_block)

    @property
    def kept(self) -> int:
        """Bytes that forward keeps for backward where nothing is computed again."""
        return sum(part.kept for part in self.parts)

    def numbers(self) -> list[float]:
        """All its figures in one list, for ranks to agree on; see `with_numbers`."""
        return [figure for part in self.parts for figure in _figures(part)] + [self.seconds]

    def with_numbers(self, numbers: Sequence[float]) -> Profile:
        """Returns the same parts with other figures, such as the largest of all ranks.

        Args:
            numbers: As many as `numbers` returns, in its order.

        Raises:
            ValueError: There are more or fewer.

        Example:
            >>> profile = Profile((BlockProfile("block", kept=3),), seconds=1.0)
            >>> profile.with_numbers(profile.numbers()) == profile
            True
        """
        if len(numbers) != len(self.numbers()):
            raise ValueError(
                f"The profile has {len(self.numbers())} figures, not {len(numbers)}: it is another model's."
            )
        left, parts = list(numbers[:-1]), []
        for part in self.parts:
            count = len(_figures(part))
            parts.append(_with_figures(part, left[:count]))
            left = left[count:]
        return Profile(tuple(parts), float(numbers[-1]))


def _figures(part: BlockProfile) -> list[float]:
    own = [part.kept, part.input, part.whole, part.shared, part.seconds, part.again]
    # "Not keepable" is 1, so that the largest over the ranks is what all of them can do.
    return own + [
        figure for op in part.operations for figure in (op.seconds, op.bytes, op.extra, op.there, not op.keepable)
    ]


def _with_figures(part: BlockProfile, figures: list[float]) -> BlockProfile:
    kept, given, whole, shared = (int(figure) for figure in figures[:4])
    operations = [
        replace(op, seconds=float(seconds), bytes=int(size), extra=int(extra), there=int(there), keepable=not barred)
        for op, seconds, size, extra, there, barred in zip(
            part.operations, *(figures[6 + column :: 5] for column in range(5)), strict=True
        )
    ]
    return replace(
        part,
        kept=kept,
        input=given,
        whole=whole,
        shared=shared,
        seconds=float(figures[4]),
        again=float(figures[5]),
        operations=tuple(operations),
    )
