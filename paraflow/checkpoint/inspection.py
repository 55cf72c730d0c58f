"""What is in a checkpoint, or a folder of them, for the eye, with rich, and as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paraflow.checkpoint.contents import Contents, contents
from paraflow.checkpoint.listing import Entry, entries, is_folder_of_checkpoints
from paraflow.plan_memory import as_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_ENDLESS = 10_000


def look(
    path: str | Path, *, best: bool = False, newest: bool = False, checksums: bool = False
) -> Contents | list[Entry]:
    """Returns what is in a checkpoint, or the checkpoints of a folder.

    Args:
        path: A checkpoint, or a folder of them.
        best: Of a folder, what is in the one with the best monitored value.
        newest: Of a folder, what is in the newest.
        checksums: Whether all files are read and compared with their checksums.

    Raises:
        CheckpointError: There is no checkpoint, or it cannot be read.
    """
    if is_folder_of_checkpoints(path) and not best and not newest:
        return entries(path, checksums=checksums)
    return contents(path, best=best, checksums=checksums)


def has_problems(found: Contents | Sequence[Entry]) -> bool:
    """Whether something was found to be wrong."""
    return any(one.problem for one in ([found] if isinstance(found, Contents) else found))


def as_json(found: Contents | Sequence[Entry], *, tensors: bool = False) -> str:
    """Returns one object for a checkpoint, and a list of them for a folder."""
    plain = found.as_dict(tensors=tensors) if isinstance(found, Contents) else [entry.as_dict() for entry in found]
    return json.dumps(plain, indent=2)


def show(found: Contents | Sequence[Entry], console: Console | None = None, *, tensors: bool = False) -> None:
    """Prints it; what is no terminal gets whole lines, so that they can be searched."""
    from rich.console import Console
    from rich.text import Text

    console = console or (Console() if sys.stdout.isatty() else Console(width=_ENDLESS))
    if isinstance(found, Contents):
        _show_one(found, console, tensors=tensors)
    else:
        _show_folder(found, console)
    for one in [found] if isinstance(found, Contents) else found:
        if one.problem:
            console.print(Text.assemble(("error", "bold red"), f": {one.problem}"))


def _show_one(one: Contents, console: Console, *, tensors: bool) -> None:
    from rich.text import Text

    console.print(Text(str(one.path), style="bold"))
    table = _table()
    for name, text in _facts(one):
        table.add_row(Text(name, style="cyan"), Text(text))
    console.print(table)
    if tensors:
        _show_tensors(one, console)


def _show_folder(entries: Sequence[Entry], console: Console) -> None:
    from rich.text import Text

    console.print(Text(str(entries[0].path.parent), style="bold"))
    table = _table("checkpoint", "step", "written", "size", "value", "")
    for column in (1, 3, 4):
        table.columns[column].justify = "right"
    for entry in entries:
        one = entry.contents
        facts = ("", "", "") if one is None else (str(one.step), one.written_text[:19], as_text(one.size))
        value = "" if entry.value is None else f"{entry.value:.5g}"
        state = "damaged" if entry.problem else "intact" if one is not None and one.verified else ""
        marks = ", ".join(filter(None, (*entry.marks, state)))
        table.add_row(entry.path.name, *facts, value, marks, style="red" if entry.problem else None)
    console.print(table)


def _facts(one: Contents) -> Iterable[tuple[str, str]]:
    yield "step", f"{one.step}, {one.epoch} complete epochs"
    yield "written", one.written_text
    plan = ", ".join(f"{name}={value}" for name, value in one.plan.items())
    yield "plan", plan or "one device"
    yield "world size", str(one.world_size)
    yield "model", one.model_class or "unknown"
    yield "weights", ", ".join(f"{count:,} {dtype}" for dtype, count in one.numbers.items()) or "none"
    yield "bytes", ", ".join(f"{part} {as_text(size)}" for part, size in one.bytes.items())
    yield "files", "\n".join(f"{name} {as_text(size)}" for name, size in one.files.items())
    yield "last epoch", ", ".join(f"{name} {value:.5g}" for name, value in one.metrics.items()) or "none complete"
    for callback, best in one.best.items():
        value = "" if best["value"] is None else f" {best['value']:.5g}"
        yield "best", f"{best.get('monitor', '')}{value} at step {best['step']} ({callback})".strip()
    yield "callbacks", ", ".join(one.callbacks) or "none"
    yield "checksums", _checksums(one)


def _checksums(one: Contents) -> str:
    if one.problem:
        return "do not hold" if one.verified else "not compared"
    return "hold" if one.verified else "not compared (--verify does); all files are there"


def _show_tensors(one: Contents, console: Console) -> None:
    table = _table("tensor", "dtype", "shape", "pieces")
    table.columns[3].justify = "right"
    for tensor in one.tensors:
        shape = " × ".join(map(str, tensor.shape)) or "scalar"
        table.add_row(tensor.name, tensor.dtype, shape, str(len(tensor.files) or 1))
    console.print()
    console.print(table)


def _table(*columns: str) -> Table:
    from rich.table import Table

    return Table(*columns, show_header=bool(columns), box=None, padding=(0, 2, 0, 0), header_style="cyan")
