"""Which rank this process is, as torchrun, `paraflow launch` and `paraflow.spawn` say it: in environment variables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from paraflow.errors import LaunchError


def rank() -> int:
    """The rank of this process among all processes of the run, from RANK; 0 in a run of one process.

    Raises:
        LaunchError: RANK or WORLD_SIZE is not a whole number, or RANK is not below WORLD_SIZE.

    Example:
        >>> rank(), world_size(), local_rank(), local_world_size(), is_main()
        (0, 1, 0, 1, True)
    """
    return _place("RANK", "WORLD_SIZE")


def world_size() -> int:
    """The number of processes of the run, on all nodes, from WORLD_SIZE; 1 where nothing launched this process.

    Raises:
        LaunchError: WORLD_SIZE is not a whole number of at least 1.
    """
    return _whole_number("WORLD_SIZE", default=1, least=1)


def local_rank() -> int:
    """The rank of this process among the processes of its node, from LOCAL_RANK: the index of its accelerator.

    Raises:
        LaunchError: LOCAL_RANK or LOCAL_WORLD_SIZE is not a whole number, or LOCAL_RANK is not below LOCAL_WORLD_SIZE.
    """
    return _place("LOCAL_RANK", "LOCAL_WORLD_SIZE")


def local_world_size() -> int:
    """The number of processes of the run on this node, from LOCAL_WORLD_SIZE.

    Raises:
        LaunchError: LOCAL_WORLD_SIZE is not a whole number of at least 1.
    """
    return _whole_number("LOCAL_WORLD_SIZE", default=1, least=1)


def is_main() -> bool:
    """Whether this process is rank 0: the one that prints and writes files."""
    return rank() == 0


@contextmanager
def alone() -> Iterator[None]:
    """Runs a block in which this process is a run of its own: rank 0 of a world of one.

    Example:
        >>> with alone():
        ...     rank(), world_size()
        (0, 1)
    """
    said = {name: os.environ.pop(name) for name in _PLACES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(said)


_PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


def _place(name: str, size_name: str) -> int:
    place = _whole_number(name, default=0, least=0)
    # A launcher that sets a place but no size (a batch system's own) leaves nothing to compare with.
    if size_name not in os.environ:
        return place
    size = _whole_number(size_name, default=1, least=1)
    if place < size:
        return place
    raise LaunchError(
        f"The environment says {name}={place} with {size_name}={size}, but a {name} counts from 0 and stays below "
        f"{size_name}. Set both, or start the script with `paraflow launch` or `torchrun`, which set them."
    )


def _whole_number(name: str, default: int, least: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if text.strip().isdecimal() and int(text) >= least:
        return int(text)
    raise LaunchError(
        f"The environment says {name}={text!r}, but {name} must be a whole number of at least {least}. "
        f"Unset it for a run of one process, or start the script with `paraflow launch` or `torchrun`."
    )
