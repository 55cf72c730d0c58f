"""Commands that start processes: `launch` and `doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from paraflow.cli.app import main
from paraflow.errors import LaunchError


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
    settings: Annotated[str, typer.Option("--rdzv-conf", help="Torch's rendezvous settings: key=value,...")] = "",
    max_restarts: Annotated[int, typer.Option("--max-restarts", help="Fresh starts after a failure.")] = 0,
    grace: Annotated[str, typer.Option("--grace", help="Time to save, from a signal to a kill: 90s, 2min.")] = "60s",
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT names a module, as in python -m.")] = False,
) -> None:
    """Run SCRIPT as the ranks of one run; plain torchrun does the same.

    Exits with the status of the rank that failed first, and prints its traceback last. Ctrl-C or SIGTERM lets the
    ranks save first (exit status 130 or 143); a second one kills them.
    """
    try:
        from paraflow.launch.elastic import LaunchOptions
        from paraflow.launch.elastic import launch as run
        from paraflow.launch.options import grace_seconds

        options = LaunchOptions(
            script=script,
            arguments=tuple(arguments or ()),
            processes=processes,
            nodes=nodes,
            node_rank=node_rank,
            rendezvous_endpoint=endpoint,
            rendezvous_backend=backend,
            rendezvous_id=run_id,
            rendezvous_settings=settings,
            max_restarts=max_restarts,
            grace=grace_seconds(grace),
            module=module,
        )
        status = run(options)
    except LaunchError as error:
        typer.echo(f"paraflow launch: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    raise typer.Exit(status)


@main.command()
def doctor(
    processes: Annotated[
        str | None, typer.Option("-n", "--nproc-per-node", help="Processes on this host: a number, auto, gpu or cpu.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Report what a run finds on this host, measured by as many ranks, and what is wrong; exits with 1 on an error.

    On several nodes: paraflow launch --nnodes 2 --rdzv-endpoint HOST:PORT -m paraflow.doctor.
    """
    try:
        from paraflow.doctor import examination, report
        from paraflow.doctor.software import environment
        from paraflow.launch.options import local_processes
        from paraflow.launch.spawn import spawn

        number = local_processes(processes)
        ranks = examination.examine() if number == 1 else spawn(examination.examine, number, timeout=600)[0]
        ranks[0]["environment_outside"] = environment()  # spawn sets each rank's place anew
    except LaunchError as error:
        typer.echo(f"paraflow doctor: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    if as_json:
        typer.echo(report.as_json(ranks))
    else:
        report.show(ranks)
    raise typer.Exit(int(examination.has_errors(ranks)))
