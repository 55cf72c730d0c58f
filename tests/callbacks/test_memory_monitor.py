"""Memory is what this process uses, and only what grows in a straight line is called a leak."""

from __future__ import annotations

import ctypes
import gc
import random
import re
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch

import paraflow as pf
from paraflow.callbacks import LambdaCallback
from paraflow.callbacks.memory_monitor import MemoryMonitor, grows_in_a_line, host_memory
from tests.callbacks.runs import linear, samples

MIB = 1024**2


def run(monitor: MemoryMonitor, *callbacks: Any, epochs: int = 1, count: int = 16) -> list[dict[str, float]]:
    seen: list[dict[str, float]] = []
    note = LambdaCallback(on_step_end=lambda trainer, logs: seen.append({**logs}))
    trainer = pf.Trainer(max_epochs=epochs, callbacks=[*callbacks, monitor, note], progress=False)
    trainer.fit(linear(), samples(count), batch_size=4)
    return seen


def test_memory_of_this_process_is_told() -> None:
    before = host_memory()
    kept: list[torch.Tensor] = []
    hold = LambdaCallback(on_step_end=lambda trainer, logs: kept.append(torch.ones(64 * MIB // 4)))
    seen = run(MemoryMonitor(every=1), hold)
    assert len(seen) == 4
    for logs in seen:
        assert logs["memory/peak"] >= logs["memory/now"] > 0
        assert "memory/reserved" not in logs
    assert seen[0]["memory/now"] >= before["now"] + 48 * MIB
    for earlier, later in pairwise(seen):
        assert later["memory/now"] - earlier["memory/now"] == pytest.approx(64 * MIB, abs=16 * MIB)


def test_how_often() -> None:
    assert ["memory/now" in logs for logs in run(MemoryMonitor(every=3))] == [False, False, True, False]


def line(start: float, step: float, count: int = 20) -> list[float]:
    return [start + step * look for look in range(count)]


@pytest.mark.parametrize(
    ("amounts", "leaks"),
    [
        (line(1e9, 1e8), True),
        (line(1e9, 0.0), False),
        (line(1e9, -1e8), False),
        (line(1e9, 2 * MIB), False),  # 38 MiB: too little to say
        (line(100e9, 1e8), False),  # 2 %
        ([1e9] * 10 + [3e9] * 10, False),  # one step up, as when another input shape comes
        ([1e9 + 1e9 * (1 - 0.5**look) for look in range(20)], False),  # caches that fill
        ([*line(1e9, 1e8, 19), 1e9], False),  # given back
        ([amount + random.Random(0).uniform(0, 2e7) for amount in line(1e9, 1e8)], True),
    ],
)
def test_what_is_a_leak(amounts: list[float], leaks: bool) -> None:
    assert grows_in_a_line(amounts) is leaks


LARGE = 33 * MIB // 4  # above 32 MiB memory always comes from the system, and goes back to it


def sentences(*callbacks: Any, epochs: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(MemoryMonitor(every=1), *callbacks, epochs=epochs, count=48)
    return [str(warning.message) for warning in caught if "memory" in str(warning.message)]


def test_a_leak_is_told_once() -> None:
    kept: list[torch.Tensor] = []
    leak = LambdaCallback(on_step_end=lambda trainer, logs: kept.append(torch.ones(LARGE)))
    said = sentences(leak, epochs=4)  # of 12 steps: 20 looks after the first epoch are complete at step 32
    assert len(said) == 1
    told = re.search(r"memory grows steadily, by ([\d.]+) MiB a step over 19 steps", said[0])
    assert told is not None, said[0]
    assert float(told[1]) == pytest.approx(33, rel=0.1)  # what earlier tests left is given back meanwhile


def test_what_an_epoch_caches_is_no_leak() -> None:
    kept: list[torch.Tensor] = []

    def cache(trainer: pf.Trainer, logs: Any) -> None:
        if not trainer.epoch:
            kept.append(torch.ones(8 * MIB // 4))

    assert sentences(LambdaCallback(on_step_end=cache), epochs=4) == []


def test_a_second_run_looks_anew() -> None:
    monitor = MemoryMonitor(every=1)
    kept: list[torch.Tensor] = []
    leak = LambdaCallback(on_step_end=lambda trainer, logs: kept.append(torch.ones(LARGE)))
    trainer = pf.Trainer(max_epochs=3, callbacks=[leak, monitor], progress=False)
    for _ in range(2):
        kept.clear()
        _settle_memory()
        with pytest.warns(UserWarning, match="memory grows steadily"):
            trainer.fit(linear(), samples(48), batch_size=4)


def _settle_memory() -> None:
    """Gives back to the system what tests before have left to the allocator, which would go back at any later time."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _in_use() -> int:
    _settle_memory()
    return int(host_memory()["now"])


def _on_ranks(more: int) -> list[dict[str, float]]:
    """What is told, and what this rank uses itself a moment before; the second rank holds more."""
    import os

    held = torch.ones(more // 4 if os.environ["RANK"] == "1" else 1)
    own: list[float] = []
    look = LambdaCallback(on_step_end=lambda trainer, logs: own.append(host_memory()["now"]))
    seen = run(MemoryMonitor(every=2), look)
    return [
        {"own": used, "held": float(held.sum()), **logs}
        for used, logs in zip(own, seen, strict=True)
        if "memory/now" in logs
    ]


def test_the_largest_over_ranks_is_told(ranks: Any) -> None:
    # The ranks have run other tests before, and one of them may have been left with more than the other.
    first_uses, second_uses = ranks(2, _in_use)
    first, second = ranks(2, _on_ranks, 256 * MIB + max(0, first_uses - second_uses))
    for mine, other in zip(first, second, strict=True):
        assert mine["memory/now"] == other["memory/now"] == pytest.approx(other["own"], abs=32 * MIB)
        assert mine["memory/now"] > mine["own"] + 128 * MIB
        assert mine["memory/peak"] == other["memory/peak"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_of_the_device_is_told() -> None:
    seen = run(MemoryMonitor(every=1))
    for logs in seen:
        assert logs["memory/reserved"] >= logs["memory/peak"] >= logs["memory/now"] > 0
