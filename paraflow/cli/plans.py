"""Commands about plans: `explain`, `verify`, `compatibility` and `version`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from paraflow.cli.app import main
from paraflow.errors import LaunchError, ParaflowError


# The parser stops at the script: every word behind it is the script's own.
@main.command(context_settings={"allow_interspersed_args": False})
def explain(
    script: Annotated[str, typer.Argument(help="The script.", show_default=False)],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.")] = None,
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, help="As on so many ranks.")] = 1,
) -> None:
    """Explain what SCRIPT would do on so many ranks: plan, reasons, task graph, and what moves between ranks in a step.

    The script runs up to its first fit; no process is started, and nothing is trained. Exits with 1 where the plan is
    refused.
    """
    from paraflow.explaining import explain_script

    try:
        typer.echo(explain_script(script, ranks, arguments or ()))
    except ParaflowError as error:
        typer.echo(f"paraflow explain: {error}", err=True)
        raise typer.Exit(1) from None


@main.command(context_settings={"allow_interspersed_args": False})
def verify(
    script: Annotated[str, typer.Argument(help="The script.", show_default=False)],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.")] = None,
    processes: Annotated[
        str | None, typer.Option("-n", "--nproc-per-node", help="Processes on this node: a number, auto, gpu or cpu.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps to compare.")] = 5,
) -> None:
    """Train SCRIPT's model a few steps under its plan and on one process, and print how far the two are apart.

    The script runs up to its first fit, whose model and data are taken; copies of the model are trained. Exits with 1
    where the difference is beyond the bound, and with 2 where the plan is refused.
    """
    from paraflow.launch.elastic import LaunchOptions, launch

    with TemporaryDirectory() as folder:
        said = Path(folder, "status")
        words = ("--steps", str(steps), "--status", str(said), script, *(arguments or ()))
        options = LaunchOptions(script="paraflow.verification", module=True, arguments=words, processes=processes)
        try:
            status = launch(options)
        except LaunchError as error:
            typer.echo(f"paraflow verify: {error}", err=True)
            raise typer.Exit(error.exit_code) from None
        raise typer.Exit(status or int(said.read_text()))


@main.command()
def compatibility() -> None:
    """Print what can be combined with what, and why the rest is refused, as Markdown."""
    from paraflow.compatibility import page

    typer.echo(page(), nl=False)


@main.command()
def version() -> None:
    """Print the version of paraflow and of torch."""
    from importlib import metadata

    for package in ("paraflow", "torch"):
        try:
            typer.echo(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            typer.echo(f"{package} is not installed")
