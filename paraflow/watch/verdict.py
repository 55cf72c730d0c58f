"""What the positions of all ranks say: who is waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paraflow.watch.position import Position

_SILENT = "its process is stopped, dead, or in a call that keeps the interpreter's lock, or its host is gone"


@dataclass(frozen=True)
class Verdict:
    """Who is waited for.

    Attributes:
        missing: The ranks that the others wait for.
        text: It in a sentence, and a line for each rank.
        hopeless: Whether a rank waits in a collective that cannot come to its end while the missing ranks stay away.
    """

    missing: tuple[int, ...]
    text: str
    hopeless: bool


def judge(
    positions: Sequence[Position], left: Mapping[int, str], world_size: int, stalled_after: float = 0.0
) -> Verdict:
    """Finds out who is waited for.

    Args:
        positions: Those of the ranks that answered.
        left: Why each rank that has left the run did so.
        world_size: The number of ranks.
        stalled_after: After how many seconds a rank that does not move is stalled; one that has moved since is waited
            for with hope.

    Example:
        >>> waits = Position(0, 5, 60.0, "train.py:9 in <module>", "all_reduce(float[4]), number 7")
        >>> sleeps = Position(1, 5, 61.0, "train.py:33 in training_step", None)
        >>> verdict = judge([waits, sleeps], {}, 2)
        >>> verdict.missing, verdict.hopeless
        ((1,), True)
        >>> print(verdict.text)
        rank 0 waits for rank 1.
          rank 0: after step 5, at train.py:9 in <module>, waits in all_reduce(float[4]), number 7, for 60 s
          rank 1: after step 5, at train.py:33 in training_step, is in no collective, for 61 s
    """
    said = {position.rank: position for position in positions}
    waiting = [rank for rank, position in said.items() if position.collective]
    silent = [rank for rank in range(world_size) if rank not in said and rank not in left]
    missing = sorted([*(rank for rank in said if rank not in waiting), *silent, *left])
    if not missing:
        missing = _behind([said[rank] for rank in waiting])
    alive = [rank for rank in missing if rank in said and said[rank].seconds < 0.9 * stalled_after]
    lines = [str(said[rank]) for rank in sorted(said)]
    lines += [f"rank {rank}: does not answer; {_SILENT}" for rank in silent]
    lines += [f"rank {rank}: has left the run: {why}" for rank, why in sorted(left.items())]
    head = _head([rank for rank in waiting if rank not in missing], missing, waiting)
    return Verdict(tuple(missing), "\n  ".join([head, *lines]), bool(waiting) and not alive)


def _behind(waiting: Sequence[Position]) -> list[int]:
    """Of ranks that all wait, those that are in an earlier collective of the one group than the others."""
    if len({position.group for position in waiting}) != 1:
        return []
    first = min(position.sequence for position in waiting)
    behind = [position.rank for position in waiting if position.sequence == first]
    return behind if len(behind) < len(waiting) else []


def _head(waiting: list[int], missing: list[int], all_waiting: list[int]) -> str:
    if not all_waiting:
        return "No rank waits for another; each is busy at its line."
    if not missing:
        return "All ranks wait, each in a collective of its own, or for the network."
    verb = "waits" if len(waiting) == 1 else "wait"
    return f"{_ranks(waiting)} {verb} for {_ranks(missing)}."


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks in words; of many, the first ones.

    Example:
        >>> _ranks([3]), _ranks([0, 2]), _ranks(range(40))
        ('rank 3', 'ranks 0, 2', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 32 more')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return "ranks " + ", ".join(str(rank) for rank in list(ranks)[:8]) + more
