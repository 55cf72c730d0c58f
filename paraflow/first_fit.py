"""Runs a script up to its first fit, and does something else there: what commands about a script's plan do."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from paraflow.errors import LaunchError
from paraflow.trainer import Trainer

Result = TypeVar("Result")
Instead = Callable[[Trainer, nn.Module, Any, int | None], Result]
"""Takes what `fit` was given: the trainer, the model, the training data and the batch size."""


class _Done(BaseException):
    """Ends a script at its first fit; no ``except Exception`` of the script's stops it."""


def at_first_fit(script: str | Path, arguments: Sequence[str], instead: Instead[Result]) -> Result:
    """Runs a script up to its first fit, does something else in its place, and ends the script there.

    Args:
        script: The script, run as ``python SCRIPT`` would.
        arguments: The script's own arguments.
        instead: What is done.

    Returns:
        What it returned.

    Raises:
        LaunchError: There is no such script, or it ended without a fit.
        Exception: What was done instead raised it.
    """
    if not Path(script).is_file():
        raise LaunchError(f"There is no script {str(script)!r}.")
    results: list[Result] = []
    errors: list[Exception] = []
    with _arguments_of(script, arguments), _in_place_of_fit(instead, results, errors), suppress(_Done, SystemExit):
        runpy.run_path(str(script), run_name="__main__")
    if errors:
        raise errors[0]
    if not results:
        raise LaunchError(f"{script} ended without a call of Trainer.fit, so there is nothing to explain or verify.")
    return results[0]


@contextmanager
def _arguments_of(script: str | Path, arguments: Sequence[str]) -> Iterator[None]:
    words, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = words, path


@contextmanager
def _in_place_of_fit(instead: Instead[Result], results: list[Result], errors: list[Exception]) -> Iterator[None]:
    fit = Trainer.fit

    def replaced(trainer: Trainer, model: nn.Module, train: Any, *args: Any, **kwargs: Any) -> Any:
        batch_size = kwargs.get("batch_size", args[1] if len(args) > 1 else None)
        Trainer.fit = fit  # type: ignore[method-assign]  # what is done instead may train
        try:
            results.append(instead(trainer, model, train, batch_size))
        except Exception as error:  # the script may catch it, and go on
            errors.append(error)
        raise _Done

    Trainer.fit = replaced  # type: ignore[assignment, method-assign]  # for as long as the script runs
    try:
        yield
    finally:
        Trainer.fit = fit  # type: ignore[method-assign]
