"""Adds the memory in use to the numbers of a step, and warns when it runs out or leaks."""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paraflow.callbacks.base import Callback
from paraflow.interval import Interval

if TYPE_CHECKING:
    from paraflow.trainer import Trainer

_LOOKS = 20
_MIB = 1024**2
_KINDS = ("peak", "now", "reserved")


class MemoryMonitor(Callback):
    """Adds ``memory/peak`` and ``memory/now``, and ``memory/reserved`` on an accelerator: bytes, of the worst rank.

    On an accelerator they are what torch's tensors take: at most since the last look, now, and at most with what the
    allocator holds in reserve; a look begins torch's peak statistics anew. On the CPU they are the resident set of the
    process: at most since it was started, and now (on Linux only).

    It warns, once each: when the peak is within 5 % of the device's memory; and when memory has grown in a straight
    line for 20 looks, by 64 MiB and 5 % at least. The host's may grow in a run's first epoch: data is cached then.

    Args:
        every: How often to look.
    """

    def __init__(self, every: Interval | str | int = 50) -> None:
        self.every = every
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._in_use: deque[tuple[int, float]] = deque(maxlen=_LOOKS)
        self._warned: set[str] = set()

    def on_train_begin(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Forgets what was before."""
        self._begin_anew()
        self._first_epoch = trainer.epoch
        if _is_accelerator(trainer.mesh.device):
            torch.accelerator.reset_peak_memory_stats(trainer.mesh.device)

    def on_step_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Looks."""
        device = trainer.mesh.device
        mine = _device_memory(device) if _is_accelerator(device) else host_memory()
        numbers = torch.tensor([*(mine.get(kind, -1.0) for kind in _KINDS), _share(device, mine)], dtype=torch.float64)
        over_ranks = torch.stack(trainer.mesh.all_gather(numbers))
        largest = dict(zip((*_KINDS, "share"), over_ranks.amax(0).tolist(), strict=True))
        logs.update({f"memory/{kind}": largest[kind] for kind in _KINDS if largest[kind] >= 0})
        if largest["share"] >= 0.95:
            rank = int(over_ranks[:, -1].argmax())
            self._warn(trainer, "full", f"rank {rank} has used {largest['share']:.0%} of its device's memory.")
        self._look_for_a_leak(trainer, largest["now"], on_host=not _is_accelerator(device))

    def _look_for_a_leak(self, trainer: Trainer, now: float, *, on_host: bool) -> None:
        if now < 0 or (on_host and trainer.epoch == self._first_epoch):
            return
        self._in_use.append((trainer.step, now))
        if len(self._in_use) == _LOOKS and grows_in_a_line([amount for _, amount in self._in_use]):
            (first, least), (last, most) = self._in_use[0], self._in_use[-1]
            rate = (most - least) / (last - first) / _MIB
            self._warn(
                trainer,
                "leak",
                f"memory grows steadily, by {rate:.2g} MiB a step over {last - first} steps. Something is kept from "
                "each step: a list of losses that are not detached, or of batches?",
            )

    def _warn(self, trainer: Trainer, what: str, sentence: str) -> None:
        if what not in self._warned and trainer.is_main:
            warnings.warn(f"Step {trainer.step}: {sentence}", stacklevel=2)
        self._warned.add(what)


def grows_in_a_line(amounts: Sequence[float]) -> bool:
    """Whether amounts of bytes never shrink, grow by 64 MiB and 5 % at least, and stay close to a straight line.

    Example:
        >>> grows_in_a_line([1e9 + 1e8 * look for look in range(20)])
        True
        >>> grows_in_a_line([1e9] * 10 + [3e9] * 10)
        False
    """
    growth = amounts[-1] - amounts[0]
    if growth < max(64 * _MIB, 0.05 * amounts[0]) or any(b < a for a, b in pairwise(amounts)):
        return False
    line = [amounts[0] + growth * place / (len(amounts) - 1) for place in range(len(amounts))]
    return all(abs(amount - there) <= 0.1 * growth for amount, there in zip(amounts, line, strict=True))


def host_memory() -> dict[str, float]:
    """Returns the bytes of this process's resident set: ``peak``, and on Linux ``now``; nothing where it is not told.

    Source: proc(5) and getrusage(2).
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text(encoding="utf-8").splitlines() if ":" in line)
        found = {"peak": lines.get("VmHWM"), "now": lines.get("VmRSS")}
        return {kind: float(text.split()[0]) * 1024 for kind, text in found.items() if text}
    try:
        import resource
    except ImportError:  # Windows
        return {}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"peak": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit}


def _is_accelerator(device: torch.device) -> bool:
    """Whether torch keeps memory statistics of a device; Apple's GPU shares the host's memory, and has none."""
    return device.type not in ("cpu", "mps")


def _device_memory(device: torch.device) -> dict[str, float]:
    found = {
        "peak": torch.accelerator.max_memory_allocated(device),
        "now": torch.accelerator.memory_allocated(device),
        "reserved": torch.accelerator.max_memory_reserved(device),
    }
    torch.accelerator.reset_peak_memory_stats(device)
    return {kind: float(amount) for kind, amount in found.items()}


def _share(device: torch.device, memory: dict[str, float]) -> float:
    """The part of a device's memory that was used at most; of the host's, nothing is said."""
    if not _is_accelerator(device):
        return 0.0
    return memory["peak"] / torch.accelerator.get_memory_info(device)[1]
