"""A plugin the package does not know, as sharded data parallelism will be: parameters give way to shards of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paraflow.engine import Engine
from paraflow.plugins import Phase, Plugin


class _Gather(torch.autograd.Function):
    """Joins flat shards; backward gives each rank the mean of its own part of the gradient."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.ranks = group, dist.get_world_size(group)
        whole = shard.new_empty(shard.numel() * ctx.ranks)
        dist.all_gather_into_tensor(whole, shard.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        part = gradient.new_empty(gradient.numel() // ctx.ranks)
        dist.reduce_scatter_tensor(part, gradient.contiguous(), group=ctx.group)
        return part / ctx.ranks, None


class ToyShard(Plugin):
    """Each rank keeps one flat part of every parameter, and joins them for each forward."""

    name = "toy_shard"
    phase = Phase.PARTITION

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self._shapes: dict[str, torch.Size] = {}

    @property
    def fields(self) -> Mapping[str, Any]:
        return {"fsdp": self.degree}

    def transform(self, module: nn.Module, engine: Engine) -> nn.Module:
        self._mesh = engine.mesh
        for name, parameter in list(engine.module.named_parameters()):
            self._shapes[name] = parameter.shape
            owner, _, leaf = name.rpartition(".")
            engine.module.get_submodule(owner)._parameters[leaf] = nn.Parameter(self._cut(parameter.detach()))
        return _Whole(module, engine.module, self)

    def _cut(self, whole: torch.Tensor) -> torch.Tensor:
        size = -(-whole.numel() // self.degree)
        padded = torch.zeros(size * self.degree).index_copy(0, torch.arange(whole.numel()), whole.flatten())
        return padded.chunk(self.degree)[self._mesh.coordinate("fsdp")].clone()

    def join(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        shape = self._shapes[name]
        return _Gather.apply(shard, self._mesh.group("fsdp"))[: shape.numel()].view(shape)

    def partitioned_over(self, name: str, parameter: nn.Parameter) -> Sequence[str]:
        return ("fsdp",)

    def state_dict(self, state: dict[str, Any], engine: Engine) -> dict[str, Any]:
        state["model"] = {name: self.join(name, shard).detach() for name, shard in state["model"].items()}
        for name, values in state.get("optimizer", {"state": {}})["state"].items():
            for key, value in values.items():
                if value.dim():
                    values[key] = self.join(name, value)
        return state

    def load_state_dict(self, state: dict[str, Any], engine: Engine) -> dict[str, Any]:
        state["model"] = {name: self._cut(whole[...]) for name, whole in state["model"].items()}
        for values in state.get("optimizer", {"state": {}})["state"].values():
            for key, value in values.items():
                if len(value.shape):
                    values[key] = self._cut(value[...])
        return state


class _Whole(nn.Module):
    """Calls the step with the shards' places taken by what they join to."""

    def __init__(self, steps: nn.Module, model: nn.Module, plugin: ToyShard) -> None:
        super().__init__()
        self.steps = steps
        self._model = (model,)
        self._plugin = plugin

    def forward(self, step: str, batch: Any) -> Any:
        shards = dict(self._model[0].named_parameters())
        whole = {f"module.{name}": self._plugin.join(name, shard) for name, shard in shards.items()}
        return torch.func.functional_call(self.steps, whole, (step, batch))
