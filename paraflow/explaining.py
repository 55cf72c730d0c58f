"""Explains what a script would do on so many ranks: its plan, why it is so, and what moves between ranks in a step.

The script runs up to its first `fit`, as rank 0 of that world, and no further: no process group is started and nothing
is trained. The sizes of activations are those of a step on fake tensors, which have shapes and no memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paraflow.data import Source, as_source
from paraflow.data.batch import map_tensors
from paraflow.first_fit import at_first_fit
from paraflow.launch.environment import world_size
from paraflow.mesh import choose_device
from paraflow.models.task import Task
from paraflow.moves import Move, Traffic
from paraflow.plan import Plan
from paraflow.plan_memory import as_text
from paraflow.resolve import THE_SCOPES, Request, Resolved, resolve
from paraflow.task_graph import Node, TaskGraph, task_graph, traffic_of
from paraflow.trainer import Trainer

_WIDTH = 120


def explain_script(script: str | Path, ranks: int, arguments: Sequence[str] = ()) -> str:
    """Runs a script up to its first fit, and explains what that would do.

    Args:
        script: The script.
        ranks: The number of ranks that it is told there are, all on one host.
        arguments: The script's own arguments.

    Raises:
        LaunchError: There is no such script, or it ended without a fit.
        ParaflowError: The plan is refused, or what was given cannot be used: as in a real run.
    """
    with _as_rank_0_of(ranks):
        return at_first_fit(script, arguments, explain)


def explain(trainer: Trainer, model: nn.Module, train: Any, batch_size: int | None = None) -> str:
    """Explains what ``trainer.fit(model, train, batch_size=...)`` would do in the world that this process is in.

    Nothing is trained, and no process group is started.

    Args:
        trainer: The Trainer.
        model: The model.
        train: Its training data.
        batch_size: Samples of a step over all ranks.

    Raises:
        ParaflowError: The plan is refused, or what was given cannot be used.
    """
    source = as_source(train, batch_size=batch_size, shuffle=True, name="training data")
    task, device = Task(model), choose_device(trainer.device)
    request = trainer.request.with_scopes(model, device)
    resolved = resolve(request, device, source.batch_size)
    traffic = _traffic(task, resolved.plan, source)
    graph = task_graph(model, _with_details(resolved), traffic)
    return _in_words(model, request, resolved, graph)


@contextmanager
def _as_rank_0_of(ranks: int) -> Iterator[None]:
    place = {"RANK": 0, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": ranks}
    former = {name: os.environ.get(name) for name in place}
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        yield
    finally:
        for name, value in former.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


_DETAILS = {
    "fsdp": ("zero", "reduce", "reshard_after_forward", "gather_dtype"),
    "pipeline": ("stages", "schedule", "chunks", "costs", "reshard"),
    "split": ("modules", "plan", "degree"),
    "tensor_parallel": ("modules", "plan"),
}
"""What of a plugin says how a model is laid out."""


def _with_details(resolved: Resolved) -> Plan:
    """The plan with what plugins were told that were given as such, and not by the plan's options."""
    options = dict(resolved.plan.options)
    for plugin in resolved.plugins:
        if plugin.name in _DETAILS and plugin.name not in options:
            told = {key: vars(plugin).get(key, vars(plugin).get(f"_{key}")) for key in _DETAILS[plugin.name]}
            options[plugin.name] = {key: value for key, value in told.items() if value is not None}
    return resolved.plan.with_fields(options=options)


def _traffic(task: Task, plan: Plan, source: Source) -> dict[str, Traffic]:
    """What goes in and out of modules for one micro-batch of a rank, or nothing where no sample can be had or run."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    sample = getattr(source, "sample", None)
    if sample is None or source.batch_size is None or plan.world_size == 1:
        return {}
    rows = -(-source.batch_size // (plan.data_ranks * plan.accumulate))
    try:
        real = sample(rows)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad(), _computing_in(plan):
            batch = map_tensors(mode.from_tensor, real)
            return traffic_of(task.module, lambda: task.training_step(batch))
    except Exception:  # whatever a model does that needs values: its activations are then not known
        return {}


def _computing_in(plan: Plan) -> AbstractContextManager[Any]:
    """The precision of activations; fp16 has the same sizes as bf16, which the host computes in."""
    return nullcontext() if plan.precision == "fp32" else torch.autocast("cpu", torch.bfloat16)


def _in_words(model: nn.Module, request: Request, resolved: Resolved, graph: TaskGraph) -> str:
    from rich.console import Console

    plan, count = resolved.plan, sum(parameter.numel() for parameter in model.parameters())
    console = Console(file=StringIO(), width=_WIDTH, color_system=None)
    ranks = world_size()
    console.print(f"{type(model).__name__}: {count:,} parameters, on {ranks} rank{'s' if ranks > 1 else ''}: {plan}")
    console.print(_table("the plan", ("field", "value", "because of"), _reasons(request, resolved)))
    for plugin in resolved.plugins:
        console.print(f"  {plugin.describe()}", soft_wrap=True)
    rows = [_node_row(node, plan) for node in graph.nodes]
    console.print(_table("the task graph", ("scope", "modules", "parameters", "ranks", "a rank holds"), rows))
    if graph.moves:
        rows = [_move_row(move) for move in graph.moves]
        console.print(_table("what moves in a step", ("what", "between", "a rank sends"), rows))
    elif ranks == 1:
        console.print(
            "One process: nothing moves, and scopes change nothing. For more ranks: paraflow explain -n RANKS."
        )
    file: Any = console.file
    return str(file.getvalue()).rstrip()


def _reasons(request: Request, resolved: Resolved) -> list[tuple[str, str, str]]:
    """Each field that differs from one device, its value, and who said it."""
    said: dict[str, str] = {}
    for place, fields in (*request.sources(), (THE_SCOPES, request.scopes)):
        for name, value in fields.items():
            for key in [f"options of {plugin}" for plugin in value] if name == "options" else [name]:
                said[key] = f"{said[key]}, {place}" if key in said else place
    said.update({choice.field: f"auto: {choice.reason}" for choice in resolved.choices})
    rows = []
    for name, value in resolved.plan.changed().items():
        parts = {f"options of {plugin}": options for plugin, options in value.items()} if name == "options" else {}
        for key, one in (parts or {name: value}).items():
            rows.append((key, _value_in_words(one), said.get(key, f"fills the world of {world_size()}")))
    return rows


def _value_in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_value_in_words(one)}" for key, one in value.items())
    if isinstance(value, tuple):
        return " | ".join(_value_in_words(one) if isinstance(one, str) else _some(one) for one in value)
    return str(value)


def _node_row(node: Node, plan: Plan) -> tuple[str, ...]:
    scope = node.scope if plan.pp == 1 else f"stage {node.stage}: {node.scope}"
    layout = "" if node.layout in scope else f" ({node.layout})"
    ranks = f"{node.ranks[0]} to {node.ranks[-1]}" if len(node.ranks) > 1 else str(node.ranks[0])
    return f"{scope}{layout}", _some(node.modules), f"{node.parameters:,}", ranks, f"{node.held:,}"


def _move_row(move: Move) -> tuple[str, ...]:
    size = "not known without a step on data" if move.bytes is None else as_text(move.bytes)
    return move.what, move.between, size


def _some(names: Sequence[str], most: int = 6) -> str:
    if isinstance(names, str) or len(names) <= most:
        return names if isinstance(names, str) else ", ".join(names)
    return f"{names[0]}, {names[1]}, ... {names[-1]} ({len(names)} modules)"


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in columns:
        table.add_column(name, justify="right" if name in ("parameters", "a rank holds", "a rank sends") else "left")
    for row in rows:
        table.add_row(*row)
    return table
