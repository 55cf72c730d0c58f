"""What is printed when a run starts: the model, the plan, how the batch is divided, what was chosen and why."""

from __future__ import annotations

from collections.abc import Sequence

from paraflow.data import Division, Source
from paraflow.engine import Engine
from paraflow.outline import outline_of
from paraflow.planner import Choice


def describe(engine: Engine, choices: Sequence[Choice], source: Source) -> list[str]:
    """Returns what is printed when a run starts, one line a thing."""
    mesh, plan = engine.mesh, engine.plan
    trained = sum(parameter.numel() for parameter in engine.parameters)
    total = sum(parameter.numel() for parameter in engine.module.parameters())
    frozen = f", {total - trained:,} of them frozen" if total != trained else ""
    ranks = f"{mesh.world_size} {mesh.device.type} rank{'s' if mesh.world_size > 1 else ''}"
    here = "" if outline_of(engine.module) is None else " in this rank's stages"
    lines = [f"[bold]{type(engine.module).__name__}[/bold]: {total:,} parameters{here}{frozen}, on {ranks}"]
    lines += [f"  auto: {choice.field} = {choice.value}, because {choice.reason}" for choice in choices]
    said = {choice.field for choice in choices}
    lines += [
        f"  plan: {plugin.describe()}" for plugin in engine.plugins if not said.issuperset(plugin.fields) or not choices
    ]
    if source.batch_size is not None:
        lines.append(f"  {Division(plan.data_ranks, mesh.data_rank, plan.accumulate).describe(source.batch_size)}")
    if plan.data_ranks * plan.accumulate > 1 and _has_batch_norm(engine):
        lines.append(
            "  [yellow]note[/yellow]: batch normalisation sees one micro-batch of one rank at a time, so this model "
            "does not train the same under every plan; group or layer normalisation does"
        )
    return lines


def _has_batch_norm(engine: Engine) -> bool:
    return any(getattr(layer, "track_running_stats", False) for layer in engine.module.modules())
