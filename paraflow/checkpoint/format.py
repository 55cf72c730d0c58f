"""The checkpoint on disk: a folder with tensors in safetensors and everything else in JSON.

    step-00000100/
        tensors-00000.safetensors   what rank 0 has written: the tensors that are whole, and its parts of the others
        tensors-00001.safetensors   what rank 1 has written, where tensors are spread over ranks; and so on
        state.json                  the rest of the state, marks where tensors belong in it, and where each tensor lies
        checksums.json              the SHA-256 of all of them

Every file of tensors names the save that it belongs to. Nothing in a checkpoint is ever unpickled, or imported by a
name found in it. A folder is written beside its place, synced to the disk and then renamed: under its own name it is
whole, or it is not there.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import time
from pathlib import Path

from paraflow.checkpoint.image import Image
from paraflow.checkpoint.index import index_of, metadata_of
from paraflow.checkpoint.ranks import Ranks
from paraflow.checkpoint.tensors import size_of, write_tensors
from paraflow.errors import CheckpointError

VERSION = 2
STATE, CHECKSUMS = "state.json", "checksums.json"


def write(folder: Path, image: Image, ranks: Ranks | None = None) -> None:
    """Writes a state to a folder, which appears whole: every rank that has something to write calls it.

    Beside the state itself it takes the memory of one bucket at most, and none for tensors that lie on the host.

    Args:
        folder: Where the state is to be.
        image: The state.
        ranks: Those that write, where there are others.

    Raises:
        CheckpointError: A tensor is of a kind that cannot be kept, or the disk refuses it, here or on another rank.
    """
    ranks = ranks or Ranks()
    aside = folder.with_name(f".{folder.name}.writing")
    if ranks.rank:
        _follow(folder, aside, image, ranks)
    else:
        _lead(folder, aside, image, ranks)


def _lead(folder: Path, aside: Path, image: Image, ranks: Ranks) -> None:
    """Rank 0's part: the folder, its tensors, and when all have written, the rest."""
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        ranks.begin()
        sums = {_file_of(0): _write_tensors(aside, image, ranks)}
        sums |= {_file_of(rank): checksum for rank, checksum in ranks.checksums().items()}
        _write_state(aside, image, ranks, sums)
        sync(aside)
        _put_in_place(aside, folder)
    except BaseException as error:
        failure = _failure(folder, image, ranks, error)
        with contextlib.suppress(CheckpointError, RuntimeError):
            ranks.call_off(str(failure))
        shutil.rmtree(aside, ignore_errors=True)
        if failure is error:
            raise
        raise failure from error
    ranks.end()


def _follow(folder: Path, aside: Path, image: Image, ranks: Ranks) -> None:
    """Another rank's part: its tensors."""
    ranks.await_begin()
    try:
        checksum = _write_tensors(aside, image, ranks)
    except BaseException as error:
        failure = _failure(folder, image, ranks, error)
        ranks.failed(str(failure))
        raise failure from error
    ranks.written(checksum)


def _write_tensors(aside: Path, image: Image, ranks: Ranks) -> str:
    path = aside / _file_of(ranks.rank)
    checksum = write_tensors(path, image.owned(ranks.rank), metadata_of(image, ranks.identity))
    sync(path)
    return checksum


def _write_state(aside: Path, image: Image, ranks: Ranks, sums: dict[str, str]) -> None:
    content = {
        # The time comes first, so that checkpoints can be put in order by their first bytes; a copy loses a file's own.
        "written": time.time_ns(),
        "version": VERSION,
        "save": ranks.identity,
        "files": {name: (aside / name).stat().st_size for name in sums},
        "index": index_of(image, [aside / name for name in sums]),
        "state": image.plain,
    }
    text = json.dumps(content).encode()
    (aside / STATE).write_bytes(text)
    sums = {STATE: hashlib.sha256(text).hexdigest(), **sums}
    (aside / CHECKSUMS).write_text(json.dumps(sums), encoding="utf-8")
    sync(aside / STATE)
    sync(aside / CHECKSUMS)


def _file_of(rank: int) -> str:
    return f"tensors-{rank:05d}.safetensors"


def _failure(folder: Path, image: Image, ranks: Ranks, error: BaseException) -> BaseException:
    """What is raised for an error: a sentence where the disk has refused."""
    if not isinstance(error, OSError):
        return error
    why = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        there = next(parent for parent in folder.parents if parent.exists())
        free = shutil.disk_usage(there).free
        why += f": it needs {size_of(image.owned(ranks.rank)):,} bytes, and {str(there)!r} has {free:,} left"
    return CheckpointError(
        f"The checkpoint {str(folder)!r} could not be written: {why}. What was there before is as it was."
    )


def written_at(folder: Path) -> int:
    """Returns when a checkpoint was written, in nanoseconds since the epoch, as it says itself."""
    with (folder / STATE).open("rb") as file:
        found = re.match(rb'\{"written": (\d+),', file.read(64))
    return int(found[1]) if found else (folder / STATE).stat().st_mtime_ns


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint, intact or not."""
    return (folder / STATE).is_file()


def place_aside(folder: Path) -> Path:
    """Returns where a checkpoint lies while another takes its place."""
    return folder.parent / f".{folder.name}.old"  # with_name would refuse "."


def recover(folder: Path) -> None:
    """Puts back what had a checkpoint's name before, if writing a new one in its place was cut short in between.

    Only the run that writes there may call it: one that reads could take the name between the writer's two renames.
    """
    old = place_aside(folder)
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


def _put_in_place(aside: Path, folder: Path) -> None:
    """Renames; what had the name before goes last."""
    old = place_aside(folder)
    recover(folder)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    try:
        os.replace(aside, folder)
    except OSError:
        recover(folder)
        raise
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Has a file or folder written to the disk before it returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
