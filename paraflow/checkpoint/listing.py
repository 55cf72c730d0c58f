"""The checkpoints of a folder, with what is in each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paraflow.checkpoint.contents import Contents, as_plain, contents
from paraflow.checkpoint.folders import saved_in, step_of
from paraflow.checkpoint.format import is_checkpoint
from paraflow.errors import CheckpointError


@dataclass(frozen=True)
class Entry:
    """A checkpoint in a folder of them.

    Attributes:
        path: The checkpoint.
        contents: What is in it; None where it cannot be read.
        problem: What is wrong with it, as far as was looked.
        value: What was measured at its step, as the newest readable checkpoint of the folder has it.
        marks: ``"best"``, ``"last"``, both or neither.
    """

    path: Path
    contents: Contents | None
    problem: str
    value: float | None
    marks: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Returns it as plain data that JSON can hold."""
        contents = {} if self.contents is None else self.contents.as_dict(tensors=False)
        own = {"path": str(self.path), "problem": self.problem, "value": self.value, "marks": self.marks}
        return {**contents, **{key: as_plain(value) for key, value in own.items()}}


def is_folder_of_checkpoints(path: str | Path) -> bool:
    """Whether a path is no checkpoint itself, but has some in it."""
    folder = Path(path)
    return not is_checkpoint(folder) and folder.is_dir() and bool(saved_in(folder))


def entries(path: str | Path, *, checksums: bool = False) -> list[Entry]:
    """Returns the checkpoints in a folder, in the order in which they were written; damaged ones too.

    Args:
        path: The folder.
        checksums: Whether all files are read and compared with their checksums.
    """
    inside = saved_in(Path(path))
    found: dict[Path, Contents | CheckpointError] = {}
    for part in inside:
        try:
            found[part] = contents(part, checksums=checksums)
        except CheckpointError as error:
            found[part] = error
        except OSError as error:  # such as one that a run has just removed
            found[part] = CheckpointError(f"The checkpoint {str(part)!r} cannot be read: {error}.")
    newest = next((one for part in reversed(inside) if isinstance(one := found[part], Contents)), None)
    values = {} if newest is None else newest.values
    steps = set() if newest is None else {one["step"] for one in newest.best.values()}
    best = [part for part in inside if step_of(part) in steps][-1:]
    return [
        Entry(
            path=part,
            contents=one if isinstance(one, Contents) else None,
            problem=one.problem if isinstance(one, Contents) else str(one),
            value=values.get(step_of(part)),
            marks=tuple(mark for mark, those in (("best", best), ("last", inside[-1:])) if part in those),
        )
        for part, one in found.items()
    ]
