"""What torch's allocator on the host hands out and takes back, event by event."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch


@dataclass
class Watched:
    """What was seen.

    Attributes:
        peak: The most bytes at once beside what was there before; there when the block is over.
    """

    peak: int = 0


@contextmanager
def allocations() -> Iterator[Watched]:
    """Follows each allocation and release within a block."""
    watched = Watched()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        yield watched
    results: Any = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    watched.peak = max(accumulate(sizes), default=0)


def peak_of(run: Callable[[], Any]) -> int:
    """Returns the most bytes that are there at once in a call, beside what was there before."""
    with allocations() as watched:
        run()
    return watched.peak
