"""The fields of a plan that are about memory: what they may be, and sizes in words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from paraflow.errors import PlanError

if TYPE_CHECKING:
    from paraflow.plan import Plan

RECOMPUTED = ("full", "selective", "offload", "auto")
OFFLOADED = ("optimizer", "params")

_UNITS = {
    "b": 1,
    **{unit: 1024**power for power, unit in enumerate(("kib", "mib", "gib", "tib"), 1)},
    **{unit: 1000**power for power, unit in enumerate(("kb", "mb", "gb", "tb"), 1)},
}
_SIZE = re.compile(r"\s*([\d.]+)\s*([a-z]+)\s*", re.IGNORECASE)


def require_memory_fields(plan: Plan) -> None:
    """Refuses what a field about memory cannot be.

    Raises:
        PlanError: A field is not of its kind.
    """
    _require_recomputation(plan.activation_checkpointing)
    _require_offload(plan.cpu_offload)
    groups: object = plan.apply_groups
    if groups != "backward" and (isinstance(groups, bool) or not isinstance(groups, int) or groups < 1):
        raise PlanError(
            f"apply_groups must be a whole number of at least 1, or 'backward' to apply each parameter as soon as it "
            f"has its gradient, not {groups!r}."
        )
    if plan.memory_budget is not None:
        bytes_of(plan.memory_budget)


def bytes_of(size: Any, name: str = "memory_budget") -> int:
    """Returns a size in bytes.

    Args:
        size: A number of bytes, or a text with a unit: KiB, MiB, GiB, TiB (powers of 1024) or KB, MB, GB, TB.
        name: What is called so, for the error.

    Raises:
        PlanError: It is no size.

    Example:
        >>> bytes_of("1.5GiB"), bytes_of("2 MB"), bytes_of(512)
        (1610612736, 2000000, 512)
    """
    found = _SIZE.fullmatch(size) if isinstance(size, str) else None
    try:
        count = float(found[1]) * _UNITS[found[2].lower()] if found else size
    except (KeyError, ValueError):
        count = None
    if isinstance(count, bool) or not isinstance(count, (int, float)) or not 1 <= count < float("inf"):
        raise PlanError(f"{name} must be a number of bytes or a size such as '6GiB' or '800MB', not {size!r}.")
    return int(count)


def as_text(count: float) -> str:
    """Returns a number of bytes in words.

    Example:
        >>> as_text(1536), as_text(3 * 2**30)
        ('1.5 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _require_recomputation(value: object) -> None:
    if value is None or value in RECOMPUTED or _is_patterns(value):
        return
    raise PlanError(
        f"activation_checkpointing must be one of {', '.join(map(repr, RECOMPUTED))}, or a list of patterns of module "
        f"names such as ['blocks.*'], not {value!r}."
    )


def _require_offload(value: object) -> None:
    is_fraction = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1
    if value is None or value in OFFLOADED or is_fraction or _is_patterns(value):
        return
    raise PlanError(
        f"cpu_offload must be 'optimizer', 'params', a fraction of the bytes above 0 and up to 1, or a list of "
        f"patterns of module names such as ['blocks.*'], not {value!r}."
    )


def _is_patterns(value: object) -> bool:
    if isinstance(value, str) or not isinstance(value, Iterable):
        return False
    patterns = tuple(value)
    return bool(patterns) and all(isinstance(pattern, str) for pattern in patterns)
