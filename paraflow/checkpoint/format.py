"""The checkpoint on disk: a folder with tensors in safetensors and everything else in JSON.

    step-00000100/
        tensors.safetensors     every tensor, by its path in the state
        state.json              the rest of the state, with a mark where a tensor belongs
        checksums.json          the SHA-256 of both

Nothing in it is ever unpickled, or imported by a name found in it. A folder is written beside its place, synced to the
disk and then renamed: under its own name it is whole, or it is not there.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

from paraflow.checkpoint.image import Image, put_together
from paraflow.checkpoint.tensors import size_of, write_tensors
from paraflow.errors import CheckpointError

VERSION = 1
_TENSORS, _STATE, _CHECKSUMS = "tensors.safetensors", "state.json", "checksums.json"


def write(folder: Path, image: Image) -> None:
    """Writes a state to a folder, which appears whole.

    Beside the state itself it takes the memory of one tensor at most, and none for tensors that lie on the host.

    Raises:
        CheckpointError: A tensor is of a kind that cannot be kept, or the disk refuses it.
    """
    aside = folder.with_name(f".{folder.name}.writing")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        # The time comes first, so that checkpoints can be put in order by their first bytes; a copy loses a file's own.
        text = json.dumps({"written": time.time_ns(), "version": VERSION, "state": image.plain}).encode()
        (aside / _STATE).write_bytes(text)
        sums = {_STATE: hashlib.sha256(text).hexdigest(), _TENSORS: write_tensors(aside / _TENSORS, image.tensors)}
        (aside / _CHECKSUMS).write_text(json.dumps(sums), encoding="utf-8")
        for part in (aside / _TENSORS, aside / _STATE, aside / _CHECKSUMS, aside):
            _sync(part)
        _put_in_place(aside, folder)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(_why_not_written(folder, image, error)) from error
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _why_not_written(folder: Path, image: Image, error: OSError) -> str:
    why = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        there = next(parent for parent in folder.parents if parent.exists())
        free = shutil.disk_usage(there).free
        why += f": it needs {size_of(image.tensors):,} bytes, and {str(there)!r} has {free:,} left"
    return f"The checkpoint {str(folder)!r} could not be written: {why}. What was there before is as it was."


def read(folder: Path) -> dict[str, Any]:
    """Reads the state of a folder; damage is found before anything is taken from it.

    Raises:
        CheckpointError: The folder is no checkpoint, is damaged, or is of another version.
    """
    verify(folder)
    return take(folder)


def take(folder: Path) -> dict[str, Any]:
    """Reads the state of a folder that has just been verified, on this rank or another.

    Raises:
        CheckpointError: The folder is no checkpoint, or is of another version.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        plain = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        tensors = load_file(folder / _TENSORS)
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"The checkpoint {str(folder)!r} cannot be read: {error}.") from error
    version = plain.get("version") if isinstance(plain, dict) else None
    if version != VERSION:
        raise CheckpointError(
            f"The checkpoint {str(folder)!r} is of version {version!r}, and this Paraflow reads {VERSION}."
        )
    try:
        state: dict[str, Any] = put_together(Image(plain.get("state"), tensors))
    except KeyError as error:
        raise CheckpointError(f"The checkpoint {str(folder)!r} lacks the tensor {error}.") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"The checkpoint {str(folder)!r} is not of the form of a state: {error}.") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"The checkpoint {str(folder)!r} holds no state but a {type(state).__name__}.")
    return state


def verify(folder: Path) -> None:
    """Finds damage before anything is taken from a folder.

    Raises:
        CheckpointError: A file is missing, or is not as it was written.
    """
    missing = [name for name in (_TENSORS, _STATE, _CHECKSUMS) if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{str(folder)!r} is no whole checkpoint: it has no {' and no '.join(missing)}.")
    try:
        sums = json.loads((folder / _CHECKSUMS).read_text(encoding="utf-8"))
        damaged = [name for name in (_TENSORS, _STATE) if sums.get(name) != _checksum(folder / name)]
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"The checksums of {str(folder)!r} cannot be read: {error}.") from error
    if damaged:
        raise CheckpointError(
            f"The checkpoint {str(folder)!r} is damaged: {' and '.join(damaged)} changed since it was written. Resume "
            "from another; resume='auto' takes the newest that is intact."
        )


def written_at(folder: Path) -> int:
    """Returns when a checkpoint was written, in nanoseconds since the epoch, as it says itself."""
    with (folder / _STATE).open("rb") as file:
        found = re.match(rb'\{"written": (\d+),', file.read(64))
    return int(found[1]) if found else (folder / _STATE).stat().st_mtime_ns


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint, intact or not."""
    return (folder / _STATE).is_file()


def recover(folder: Path) -> None:
    """Puts back what had a checkpoint's name before, if writing a new one in its place was cut short in between."""
    old = folder.with_name(f".{folder.name}.old")
    if not folder.exists() and is_checkpoint(old):
        os.replace(old, folder)


def remove(folder: Path) -> None:
    """Removes a checkpoint: it loses its name first, so that one that is half removed is never taken for whole."""
    going = folder.with_name(f".{folder.name}.removing")
    try:
        shutil.rmtree(going, ignore_errors=True)
        os.replace(folder, going)
    except OSError:
        return
    shutil.rmtree(going, ignore_errors=True)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _put_in_place(aside: Path, folder: Path) -> None:
    """Renames; what had the name before goes last."""
    old = folder.with_name(f".{folder.name}.old")
    recover(folder)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    try:
        os.replace(aside, folder)
    except OSError:
        recover(folder)
        raise
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
