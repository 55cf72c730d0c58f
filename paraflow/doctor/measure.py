"""What the ranks measure together: an all-reduce of several sizes, an exchange with the neighbours, their clocks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

SIZES = tuple(1 << power for power in range(10, 27, 2))  # 1 KiB to 64 MiB
_EXCHANGED = 4 << 20


def measure(device: torch.device) -> dict[str, Any]:
    """Measures this rank's part; every rank of the default process group must call it.

    Returns:
        `all_reduce`: for each size its bytes, this rank's seconds (median), and whether the sum was right;
        `exchange`: bytes a second received from the rank before while sending to the next;
        `compute`: floating-point operations a second of a matrix product, while all ranks compute.
    """
    return {
        "device": device.type,
        "all_reduce": [_all_reduce(size, device) for size in SIZES],
        "exchange": _exchange(device),
        "compute": _compute(device),
    }


def clock_offset(store: Any, rank: int, world_size: int, rounds: int = 5) -> tuple[float, float]:
    """How far this rank's clock is ahead of rank 0's, by asking rank 0 over the store.

    Args:
        store: A store of all ranks (`torch.distributed.Store`).
        rank: This rank.
        world_size: The number of ranks; every one must call this.
        rounds: How often each rank asks; the quickest answer counts.

    Returns:
        The difference in seconds, and by how many seconds it may be wrong at most.
    """
    if rank == 0:
        for key in (f"{asking}/{turn}" for asking in range(1, world_size) for turn in range(rounds)):
            store.wait([f"ask/{key}"])
            store.set(f"answer/{key}", repr(time.time()))
        return 0.0, 0.0
    best = (0.0, float("inf"))
    for turn in range(rounds):
        begin = time.time()
        store.set(f"ask/{rank}/{turn}", "")
        answer = float(store.get(f"answer/{rank}/{turn}"))
        end = time.time()
        best = min(best, ((begin + end) / 2 - answer, (end - begin) / 2), key=lambda pair: pair[1])
    return best


def _all_reduce(size: int, device: torch.device) -> dict[str, Any]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    pattern = torch.arange(size // 4, device=device) % 7
    tensor = (pattern + rank).float()
    dist.all_reduce(tensor)
    right = bool(torch.equal(tensor, (pattern * ranks + ranks * (ranks - 1) // 2).float()))
    tensor.zero_()  # sums of sums would overflow
    seconds = _time(lambda: dist.all_reduce(tensor), device, 20 if size <= 1 << 20 else 5)
    return {"bytes": size, "seconds": seconds, "right": right}


def _exchange(device: torch.device) -> float | None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if ranks == 1:
        return None
    out = torch.zeros(_EXCHANGED // 4, device=device)
    into = torch.empty_like(out)

    def exchange() -> None:
        operations = [
            dist.P2POp(dist.isend, out, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, into, (rank - 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return _EXCHANGED / _time(exchange, device, 5)


def _compute(device: torch.device) -> float:
    width = 4096 if device.type == "cuda" else 512
    matrix = torch.randn(width, width, device=device)
    return 2 * width**3 / _time(lambda: matrix @ matrix, device, 7)


def _time(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """The median seconds of a call, each waited for, begun together on all ranks."""
    times = []
    for _ in range(3):  # the first calls open connections and wait for whoever is late
        work()
    dist.barrier()
    for _ in range(repeats):
        _wait(device)
        begin = time.perf_counter()
        work()
        _wait(device)  # on a device the call only puts the work in line
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
