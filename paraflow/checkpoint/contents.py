"""What is in a checkpoint, without reading its tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from math import prod
from pathlib import Path
from typing import Any

import torch

from paraflow.checkpoint.folders import find
from paraflow.checkpoint.format import written_at
from paraflow.checkpoint.image import take_apart
from paraflow.checkpoint.reading import skim, take, verify
from paraflow.checkpoint.stored import Stored
from paraflow.errors import CheckpointError
from paraflow.plan import DEGREES, Plan

_PARTS = ("model", "optimizer", "callbacks")


@dataclass(frozen=True)
class Tensor:
    """A tensor in a checkpoint.

    Attributes:
        name: Its path in the state.
        dtype: Its dtype.
        shape: The shape of the whole.
        files: The files that its pieces are in, one for each piece; none where it is part of the plain state.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    files: tuple[str, ...]


@dataclass(frozen=True)
class Contents:
    """What is in a checkpoint.

    Attributes:
        path: The checkpoint.
        step: Optimizer steps of the run so far.
        epoch: Complete epochs.
        written: When it was written, in nanoseconds since 1970.
        plan: The fields of the run's plan that differ from one device.
        world_size: The run's ranks.
        model_class: The class of the model.
        numbers: How many numbers the model's parameters and buffers have, by dtype; tied ones count once.
        bytes: Of the tensors of the model, the optimizer and the callbacks, and the rest of the files.
        files: The bytes of each file.
        metrics: What was measured in the last complete epoch.
        best: By callback with a monitored metric: the ``step`` of the best, and its ``value`` where that is known.
        values: What the callbacks that save have measured at the steps they saved.
        callbacks: The callbacks and loggers whose state is in it.
        tensors: Its tensors.
        problem: What is wrong with it, as far as was looked.
        verified: Whether the checksums of all files were compared.
    """

    path: Path
    step: int | None
    epoch: int | None
    written: int
    plan: Mapping[str, Any]
    world_size: int
    model_class: str | None
    numbers: Mapping[str, int]
    bytes: Mapping[str, int]
    files: Mapping[str, int]
    metrics: Mapping[str, float]
    best: Mapping[str, Mapping[str, Any]]
    values: Mapping[int, float]
    callbacks: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    problem: str
    verified: bool

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(self.files.values())

    @property
    def written_text(self) -> str:
        """When it was written, in local time."""
        return datetime.fromtimestamp(self.written / 1e9).astimezone().isoformat(" ", "seconds")

    def as_dict(self, *, tensors: bool = True) -> dict[str, Any]:
        """Returns everything as plain data that JSON can hold: NaN as None, an infinity as a string."""
        plain = {**vars(self), "path": str(self.path), "written": self.written_text, "size": self.size}
        plain["values"] = {str(step): value for step, value in self.values.items()}
        plain["tensors"] = [vars(tensor) for tensor in self.tensors]
        if not tensors:
            del plain["tensors"]
        return {key: as_plain(value) for key, value in plain.items()}


def as_plain(value: Any) -> Any:
    """Returns data that JSON can hold: NaN as None, an infinity as a string."""
    if isinstance(value, Mapping):
        return {key: as_plain(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(child) for child in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def contents(path: str | Path, *, best: bool = False, checksums: bool = False) -> Contents:
    """Returns what is in a checkpoint. Its tensors are not read, unless checksums are asked for.

    Args:
        path: A checkpoint, or a folder of them, of which the newest is taken.
        best: Whether the one with the best monitored value is taken instead.
        checksums: Whether all files are read and compared with their checksums; otherwise only
            that they are there, as long as they were, and of this save.

    Raises:
        CheckpointError: There is no checkpoint, or it cannot be read.
    """
    folder = find(path, best=best)
    problem = _problem(folder, checksums)
    try:
        state = take(folder)
    except CheckpointError as error:
        raise CheckpointError(problem or str(error)) from error
    callbacks = _mapping(state, "callbacks")
    savers = [one for one in callbacks.values() if isinstance(one, dict) and {"saved", "values"} <= one.keys()]
    files = {file.name: file.stat().st_size for file in sorted(folder.iterdir()) if file.is_file()}
    return Contents(
        path=folder,
        step=_mapping(state, "counters").get("step"),
        epoch=_mapping(state, "counters").get("epoch"),
        written=written_at(folder),
        plan=_changed(_mapping(state, "plan")),
        world_size=prod(_mapping(state, "plan").get(name, 1) for name in DEGREES),
        model_class=_mapping(state, "about").get("model_class"),
        numbers=_numbers(_stored(state.get("model"))),
        bytes=_bytes(state, sum(files.values())),
        files=files,
        metrics=_last_row(_mapping(state, "history")),
        best={key: found for key, one in callbacks.items() if (found := _best(one)) is not None},
        values={step: value for one in savers for step, value in one["values"].items()},
        callbacks=tuple(callbacks),
        tensors=tuple(_tensor(name, tensor) for name, tensor in take_apart(state).tensors.items()),
        problem=problem,
        verified=checksums,
    )


def _problem(folder: Path, checksums: bool) -> str:
    try:
        (verify if checksums else skim)(folder)
    except CheckpointError as error:
        return str(error)
    return ""


def _mapping(state: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = state.get(key)
    return value if isinstance(value, dict) else {}


def _changed(plan: Mapping[str, Any]) -> dict[str, Any]:
    plain = Plan().to_dict()
    return {name: value for name, value in plan.items() if name not in plain or value != plain[name]}


def _stored(value: Any) -> Iterable[Stored]:
    """The tensors on disk in a part of a state, each once."""
    seen = set()
    for tensor in _leaves(value):
        if isinstance(tensor, Stored) and (key := tensor.pieces or id(tensor)) not in seen:
            seen.add(key)
            yield tensor


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        yield value
        return
    for child in value:
        yield from _leaves(child)


def _numbers(tensors: Iterable[Stored]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for tensor in tensors:
        counts[_name(tensor.dtype)] += prod(tensor.shape)
    return dict(counts)


def _bytes(state: Mapping[str, Any], total: int) -> dict[str, int]:
    parts = {part: sum(tensor.nbytes for tensor in _stored(state.get(part))) for part in _PARTS}
    return {**parts, "rest": total - sum(parts.values())}


def _last_row(history: Mapping[str, Any]) -> dict[str, float]:
    return {name: values[-1] for name, values in _mapping(history, "history").items() if values}


def _best(callback: Any) -> dict[str, Any] | None:
    if not isinstance(callback, dict) or callback.get("best_step") is None:
        return None
    step = callback["best_step"]
    values = callback.get("values")
    value = values.get(step) if isinstance(values, dict) else callback.get("best")
    monitor = {"monitor": callback["monitor"]} if callback.get("monitor") else {}
    return {**monitor, "step": step, "value": value if isinstance(value, (int, float)) else None}


def _tensor(name: str, tensor: Stored | torch.Tensor) -> Tensor:
    files = tuple(piece.file for piece in tensor.pieces) if isinstance(tensor, Stored) else ()
    return Tensor(name, _name(tensor.dtype), tuple(tensor.shape), files)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
