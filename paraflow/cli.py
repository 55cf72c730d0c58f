"""The command line: `paraflow launch` and `paraflow version`."""

from __future__ import annotations

from typing import Annotated

import typer

from paraflow.errors import LaunchError

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


# The parser stops at the script: every word behind it is the script's own, whatever it looks like.
@main.command(context_settings={"allow_interspersed_args": False})
def launch(
    script: Annotated[str, typer.Argument(help="The script, or the module with -m.", show_default=False)],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.")] = None,
    processes: Annotated[
        str | None, typer.Option("-n", "--nproc-per-node", help="Processes on this node: a number, auto, gpu or cpu.")
    ] = None,
    nodes: Annotated[str, typer.Option("--nnodes", help="Number of nodes, or MIN:MAX.")] = "1",
    node_rank: Annotated[int | None, typer.Option("--node-rank", help="Which node this is, from 0.")] = None,
    endpoint: Annotated[str, typer.Option("--rdzv-endpoint", help="host:port where the nodes meet.")] = "",
    backend: Annotated[str, typer.Option("--rdzv-backend", help="c10d or static.")] = "c10d",
    run_id: Annotated[str, typer.Option("--rdzv-id", help="Name of the run, the same on every node.")] = "paraflow",
    max_restarts: Annotated[int, typer.Option("--max-restarts", help="Fresh starts after a failure.")] = 0,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT names a module, as in python -m.")] = False,
) -> None:
    """Run SCRIPT as the ranks of one run; plain torchrun does the same.

    Exits with the status of the rank that failed first, and prints its traceback last.
    """
    try:
        from paraflow.launch.elastic import LaunchOptions
        from paraflow.launch.elastic import launch as run

        options = LaunchOptions(
            script=script,
            arguments=tuple(arguments or ()),
            processes=processes,
            nodes=nodes,
            node_rank=node_rank,
            rendezvous_endpoint=endpoint,
            rendezvous_backend=backend,
            rendezvous_id=run_id,
            max_restarts=max_restarts,
            module=module,
        )
        status = run(options)
    except LaunchError as error:
        typer.echo(f"paraflow launch: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    raise typer.Exit(status)


@main.command()
def version() -> None:
    """Print the version of paraflow and of torch."""
    from importlib import metadata

    for package in ("paraflow", "torch"):
        try:
            typer.echo(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            typer.echo(f"{package} is not installed")


if __name__ == "__main__":
    main()
