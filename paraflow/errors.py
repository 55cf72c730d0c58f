"""The errors Paraflow raises on purpose: sentences that say what was given, what was expected, what to write."""

from __future__ import annotations

from collections.abc import Sequence


class ParaflowError(Exception):
    """The base of every error that Paraflow raises on purpose."""


class PlanError(ParaflowError, ValueError):
    """A plan that cannot be run, with the rule that refuses it.

    Attributes:
        rule: The id of the refusing row of `paraflow.rules`, or None where no row but the plan's own form refuses.
    """

    def __init__(self, message: str, rule: str | None = None) -> None:
        super().__init__(message)
        self.rule = rule


class DataError(ParaflowError, ValueError):
    """Data that cannot be divided, read or understood."""


class ModelError(ParaflowError, ValueError):
    """A model that cannot be trained as it is: nothing to train, a loss that is no scalar, a step of another form."""


class CheckpointError(ParaflowError, RuntimeError):
    """A checkpoint that is missing, incomplete, or of another model."""


class StallError(ParaflowError, RuntimeError):
    """A run in which ranks wait for one that does not come."""


class LaunchError(ParaflowError, RuntimeError):
    """A process that could not be started, or that ended with an error.

    Attributes:
        exit_code: The exit status the failed process ended with (a signal's as 128 + its number).
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def some_of(names: Sequence[str], most: int = 5) -> str:
    """Returns names for a sentence: the first of them, and how many more there are.

    Example:
        >>> some_of(["a", "b", "c"], most=2)
        'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
