"""Counts what one rank sends for split layers, to be compared with what is said of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import paraflow as pf
from paraflow.launch.environment import world_size
from paraflow.mesh import Mesh
from paraflow.plugins.split import kinds_of, split_layers
from paraflow.task_graph import task_graph, traffic_of
from paraflow.tensor_parallel.applying import split
from paraflow.tensor_parallel.layout import layout_of
from paraflow.tensor_parallel.region import Region

Kind = Callable[[Any, int], float]

_SENT: dict[str, Kind] = {
    "allreduce_": lambda args, ranks: 2 * args[0][0].nbytes * (ranks - 1) / ranks,
    "_allgather_base_": lambda args, ranks: args[1].nbytes * (ranks - 1),
    "_reduce_scatter_base_": lambda args, ranks: args[0].nbytes * (ranks - 1),
    "alltoall_base_": lambda args, ranks: args[1].nbytes * (ranks - 1) / ranks,
}


class Sent(TorchDispatchMode):
    """Adds up the bytes that this rank sends; sizes that ranks tell each other are not counted."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.bytes = 0.0
        self.unknown: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            sent = _SENT.get(name)
            if sent is not None:
                self.bytes += sent(args, self.ranks)
            elif name != "allgather_":
                self.unknown.add(name)
        return func(*args, **(kwargs or {}))


class Gated(nn.Module):
    """Two layers that take the same input, and the one behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 12)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate(x).tanh() * self.up(x))


class Network(nn.Module):
    """A vocabulary, layers together and alone, and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1_000, 8)
        self.gated = Gated()
        self.alone = nn.Linear(8, 8)
        self.rows = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1_003)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.gated(self.table(tokens))
        return self.head(self.rows(self.alone(x).tanh()))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self(tokens).flatten(0, 1)
        return nn.functional.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))


PLAN = {"alone": "colwise_joined", "rows": "rowwise"}


def sent_and_said(beside: bool) -> tuple[float, float, set[str]]:
    """The bytes that this rank sends for a forward and backward, what the task graph says, and what was not counted."""
    ranks = world_size()
    options = {"split": {"modules": [""]}} if beside else {"tensor_parallel": {"plan": PLAN}}
    plan = pf.Plan(dp=ranks, options=options) if beside else pf.Plan(tp=ranks, options=options)
    model, tokens = Network(), torch.arange(10).view(2, 5)
    traffic = traffic_of(model, lambda: model.loss(tokens))
    moves = [move for move in task_graph(model, plan, traffic).moves if "averaged" not in move.what]
    mesh = Mesh(plan, torch.device("cpu"))
    if beside:
        split_layers(model, kinds_of(model, [""]), Region(mesh.device_mesh("dp"), gathers=0))
    else:
        split(model, layout_of(model, PLAN), Region(mesh.device_mesh("tp")), torch.device("cpu"))
    model.loss(tokens)  # in the first call more may be sent, to check the layout
    with Sent(ranks) as sent:
        model.loss(tokens).backward()
    return sent.bytes, sum(move.bytes or 0 for move in moves), sent.unknown
