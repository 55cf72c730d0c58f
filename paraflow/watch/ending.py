"""Ends a rank whose main thread waits for what will never come."""

from __future__ import annotations

import sys
from typing import NoReturn

from paraflow.errors import ParaflowError, StallError
from paraflow.launch.worker import write_failure
from paraflow.watch.signals import end_at_once


def end_run(text: str, error: ParaflowError | None = None) -> NoReturn:
    """Ends this process with exit status 1, and says why: to the launcher, which prints it last, or else to stderr."""
    error = error or StallError(text)
    if not write_failure(1, error, f"{type(error).__name__}: {error}"):
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    end_at_once(1)
