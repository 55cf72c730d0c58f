"""Steps of several contenders on the ranks of hosts, one after another, turn by turn: their seconds and their bytes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch.distributed as dist

import paraflow as pf

Steps = Mapping[str, Callable[[], object]]
"""Contenders by name, each a function that makes one step."""

_MARK = "RESULT "


@dataclass
class Taken:
    """What a contender took.

    Attributes:
        seconds: Of each of its steps, all ranks having begun and ended together.
        sent: Bytes that each host sent in a step, a mean over its steps.
        computed: Seconds that each rank's threads were on a core in a step, a mean too; other programs do not count.
    """

    seconds: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The seconds of a step in the middle of them."""
        return median(self.seconds)

    def on_the_wire(self, bits_per_second: float) -> float:
        """The share of a step in which the busiest host sends, at its network's rate."""
        return max(self.sent) * 8 / bits_per_second / self.median


class Stopwatch:
    """Times steps on all ranks; the clock is read when all are there.

    Args:
        warm_up: Steps of each contender that are not counted.
    """

    def __init__(self, warm_up: int = 2) -> None:
        self._warm_up = warm_up
        self._noted: dict[str, list[tuple[float, float, float]]] = {}

    def begin(self) -> None:
        """Begins a step."""
        self._began = _now()

    def end(self, name: str) -> None:
        """Ends a step of a contender."""
        taken = [after - before for before, after in zip(self._began, _now(), strict=True)]
        self._noted.setdefault(name, []).append((taken[0], taken[1], taken[2]))

    def turn(self, steps: Steps) -> None:
        """Has each contender make a step."""
        for name, step in steps.items():
            self.begin()
            step()
            self.end(name)

    def taken(self) -> dict[str, Taken]:
        """Returns what each has taken, on every rank."""
        counted = {name: noted[self._warm_up :] for name, noted in self._noted.items()}
        mine = {name: [fmean(values) for values in zip(*noted, strict=True)] for name, noted in counted.items()}
        every: list[Any] = [mine]
        if dist.is_initialized():
            every = [None] * dist.get_world_size()
            dist.all_gather_object(every, mine)
        return {
            name: Taken(
                seconds=[values[0] for values in noted],
                sent=[means[name][1] for means in every],
                computed=[means[name][2] for means in every],
            )
            for name, noted in counted.items()
        }


class BesideFit(pf.Callback):
    """Has others make a step before each step of a fit, and times them and the fit.

    The fit's time is all from the beginning of one step to that of the next.

    Args:
        name: What the fit is called.
        make_others: Makes the others, once the fit has made the process group.
        taken: Takes what all have taken, when the fit ends.
    """

    def __init__(self, name: str, make_others: Callable[[], Steps], taken: Callable[[dict[str, Taken]], None]) -> None:
        self._name, self._make_others, self._tell = name, make_others, taken
        self._watch = Stopwatch()
        self._others: Steps | None = None

    def on_step_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        """Ends a step of the fit, has the others make theirs, and begins the next."""
        if self._others is None:
            self._others = self._make_others()
        else:
            self._watch.end(self._name)
        self._watch.turn(self._others)
        self._watch.begin()

    def on_train_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        """Ends the last step, and tells."""
        self._watch.end(self._name)
        self._tell(self._watch.taken())
        self._others = None  # what they hold is large


def take_turns(make: Callable[[], Steps], turns: int) -> dict[str, Taken]:
    """Returns what contenders take that need no Trainer."""
    watch, steps = Stopwatch(), make()
    for _ in range(turns):
        watch.turn(steps)
    return watch.taken()


def _now() -> tuple[float, float, float]:
    """The time at which all ranks are here, the bytes this host has sent, and the seconds this rank was on a core."""
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter(), float(sent_by_host()), time.process_time()


def sent_by_host() -> int:
    """Returns the bytes that have left through the card that gloo uses; 0 where none is named."""
    card = Path("/sys/class/net", os.environ.get("GLOO_SOCKET_IFNAME", "-"), "statistics/tx_bytes")
    return int(card.read_text()) if card.exists() else 0


def tell(taken: Mapping[str, Taken]) -> None:
    """Prints, on rank 0, what `read` reads."""
    if pf.is_main():
        print(_MARK + json.dumps({name: asdict(value) for name, value in taken.items()}), flush=True)


def read(output: str) -> dict[str, Taken]:
    """Returns what the ranks of a run have told.

    Raises:
        RuntimeError: They have told nothing.
    """
    lines = [line.removeprefix(_MARK) for line in output.splitlines() if line.startswith(_MARK)]
    if not lines:
        raise RuntimeError(f"The ranks have told nothing; they wrote:\n{output[-3000:]}")
    return {name: Taken(**value) for line in lines for name, value in json.loads(line).items()}
