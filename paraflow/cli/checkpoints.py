"""Commands about checkpoints: `export` and `inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paraflow.cli.app import main
from paraflow.errors import ParaflowError


@main.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a folder of them: the newest is taken.")],
    out: Annotated[Path, typer.Argument(help="A folder, or a file that ends in .safetensors.")],
    best: Annotated[bool, typer.Option("--best", help="Take the best checkpoint of the folder.")] = False,
    averages: Annotated[bool, typer.Option("--averages", help="Averaged weights, as EMA keeps them.")] = False,
    averages_of: Annotated[
        str | None, typer.Option("--averages-of", help="The same, of this callback where several keep some.")
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Convert to fp32, bf16 or fp16.")] = None,
    max_shard: Annotated[
        str | None, typer.Option("--max-shard", help="The most bytes in one file of a folder: 5GB if not said.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace weights that are there already.")] = False,
) -> None:
    """Write the weights in CHECKPOINT to OUT as safetensors; from_pretrained takes those of a transformers model."""
    from paraflow import checkpoint as room
    from paraflow.plan_memory import as_text

    try:
        done = room.export(
            checkpoint, out, best=best, averages=averages_of or averages, dtype=dtype, max_shard=max_shard, force=force
        )
    except (ParaflowError, OSError) as error:
        typer.echo(f"paraflow export: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{done.checkpoint}: {done.tensors} tensors, {as_text(done.bytes)}")
    for file in done.files:
        typer.echo(f"  {file}")


@main.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A checkpoint, or a folder of them.")],
    best: Annotated[bool, typer.Option("--best", help="Show the best checkpoint of the folder.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="List each tensor; of a folder, the newest's.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read all files and compare their checksums.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show what is in a checkpoint, or which are in a folder of them; exits with 1 where one is not whole."""
    from paraflow.checkpoint import inspection

    try:
        found = inspection.look(path, best=best, newest=best or tensors, checksums=verify)
    except (ParaflowError, OSError) as error:
        typer.echo(f"paraflow inspect: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(inspection.as_json(found, tensors=tensors))
    else:
        inspection.show(found, tensors=tensors)
    raise typer.Exit(int(inspection.has_problems(found)))
