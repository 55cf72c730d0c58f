"""The division of what an optimizer holds into groups that are applied one after another."""

from __future__ import annotations

from collections.abc import Sequence

from paraflow.optim.held import Held


def shares_of(held: Sequence[Held], count: int) -> list[list[Held]]:
    """Divides what is held into so many groups or fewer, of whole parameters, in order, the largest as small as can be.

    Args:
        held: What is held, in the order of the optimizer's groups.
        count: The number of groups.
    """
    sizes = iter(held)
    return [[next(sizes) for _ in range(length)] for length in _lengths([one.bytes for one in held], count)]


def _lengths(sizes: Sequence[int], count: int) -> list[int]:
    """How many neighbours each group has.

    Example:
        >>> _lengths([4, 1, 1, 1, 1, 4], 3), _lengths([5, 1], 8)
        ([1, 4, 1], [1, 1])
    """
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_packed(sizes, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    return _packed(sizes, low)


def _packed(sizes: Sequence[int], room: int) -> list[int]:
    lengths, used = [0], 0
    for size in sizes:
        if used + size > room and lengths[-1]:
            lengths.append(0)
            used = 0
        lengths[-1] += 1
        used += size
    return lengths
