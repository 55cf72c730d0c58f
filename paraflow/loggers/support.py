"""What loggers need around their writing: a run's configuration, whether a package is there, sentences for failures."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paraflow.errors import ParaflowError

if TYPE_CHECKING:
    from paraflow.trainer import Trainer


def configuration(trainer: Trainer) -> dict[str, Any]:
    """Returns what a log says of a run at its start, as plain data: plan, seed and versions."""
    import paraflow

    versions = {"paraflow": paraflow.__version__, "torch": str(torch.__version__), "python": platform.python_version()}
    return {"plan": trainer.plan.to_dict(), "seed": trainer.seed, "versions": versions}


def status_of(error: BaseException | None) -> str:
    """Returns how a run ended: ``"finished"``, ``"interrupted"`` by a signal, or ``"failed"``."""
    if error is None:
        return "finished"
    return "interrupted" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed"


def require_package(package: str, logger: str, extra: str) -> None:
    """Refuses to make a logger whose package is not there; imports nothing.

    Raises:
        ParaflowError: The package is not installed.
    """
    spec = find_spec(package)
    if spec is None or spec.origin is None:  # a mere folder of that name, such as the ./wandb that W&B writes
        raise ParaflowError(f"{logger} needs {package}: pip install 'paraflow[{extra}]'.")


@contextmanager
def writing(logger: object, path: Path) -> Iterator[None]:
    """Turns what the system says of a file into a sentence that names it.

    Raises:
        ParaflowError: The block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        raise ParaflowError(
            f"{type(logger).__name__} cannot write {str(path)!r}: {error.strerror or error}. "
            "Make room or give another path; the run can be resumed from its last checkpoint."
        ) from error
