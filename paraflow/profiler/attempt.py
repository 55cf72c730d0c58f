"""Running something that may not fit in memory, and timing it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def attempt(run: Callable[[], T], device: torch.device) -> T | None:
    """Returns what a function returns, or None where memory ran out; what it had taken is then free again.

    Any other error is raised on.

    Example:
        >>> attempt(lambda: torch.empty(2**50), torch.device("cpu")) is None
        True
    """
    try:
        return run()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Only here, where the error and the frames that it holds are gone, is the memory free.
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return None


def seconds_of(run: Callable[[], object], device: torch.device) -> float | None:
    """Returns how long a function and the device's work for it take, or None where memory ran out."""

    def timed() -> float:
        _synchronise(device)
        began = time.perf_counter()
        run()
        _synchronise(device)
        return time.perf_counter() - began

    return attempt(timed, device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had, on a device or on the host.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
        (True, False)
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "not enough memory" in text)


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()
