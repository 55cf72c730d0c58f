"""The command line's own program, to which each file beside it adds commands."""

from __future__ import annotations

import typer

main = typer.Typer(
    name="paraflow",
    help="A Keras-style Trainer for PyTorch whose strategies compose.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@main.callback()
def _paraflow() -> None:
    """A Keras-style Trainer for PyTorch whose strategies compose."""
