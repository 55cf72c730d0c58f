"""A plugin the package does not know, as a pipeline will be: it replaces how a step's micro-batches are run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paraflow.data import Batch
from paraflow.engine import Engine
from paraflow.loss import StepOutput, read_step
from paraflow.plugins import Phase, Plugin
from paraflow.step import release_graph


class ToyPipeline(Plugin):
    """Two stages of a model whose `body` is a Sequential; all forwards, then all backwards (GPipe)."""

    name = "toy_pipeline"
    phase = Phase.PARTITION

    def __init__(self, cut: int) -> None:
        self.cut = cut

    @property
    def fields(self) -> Mapping[str, Any]:
        return {"pp": 2}

    def transform(self, module: nn.Module, engine: Engine) -> nn.Module:
        self._stage = engine.mesh.coordinate("pp")
        self._group = engine.mesh.group("pp")
        self._peer = dist.get_global_rank(self._group, 1 - self._stage)
        self._model = engine.module
        self._shapes = {name: p.shape for name, p in engine.module.named_parameters()}
        for place in range(len(engine.module.body)):
            if (place >= self.cut) != (self._stage == 1):
                engine.module.body[place] = nn.Identity()
        return _Evaluation(module, self)

    def run_micro_batches(self, engine: Engine, batch: Batch) -> list[StepOutput]:
        kept, outputs = [], []
        for micro in batch.micro_batches:
            x, y = micro.data
            if self._stage == 0:
                boundary = self._model.body(x)
                dist.send(boundary.detach().contiguous(), self._peer)
                kept.append((boundary, None))
            else:
                boundary = self._receive(x).requires_grad_()
                output = self._model.body(boundary)
                step = {"loss": nn.functional.cross_entropy(output, y), "output": output, "target": y}
                kept.append((boundary, read_step(step, micro.samples)))
        for micro, (boundary, output) in zip(batch.micro_batches, kept, strict=True):
            if self._stage == 0:
                gradient = torch.empty_like(boundary)
                dist.recv(gradient, self._peer)
                boundary.backward(gradient)
                x, y = micro.data
                output = StepOutput(torch.zeros(()), micro.samples, output=torch.empty(len(x), 4), target=y)
            else:
                engine.weigh(output, batch).backward()
                dist.send(boundary.grad, self._peer)
                release_graph(output, keep_output=engine.keep_outputs)
            for tensor in [output.loss] + [output.output] * engine.keep_outputs:
                dist.broadcast(tensor, dist.get_global_rank(self._group, 1), group=self._group)
            outputs.append(output)
        return outputs

    def _receive(self, x: torch.Tensor) -> torch.Tensor:
        boundary = torch.empty(x.shape[0], 16)
        dist.recv(boundary, self._peer)
        return boundary

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """Runs both stages forward; every rank has the output."""
        if self._stage == 0:
            dist.send(self._model.body(x).contiguous(), self._peer)
            output = torch.empty(x.shape[0], 4)
        else:
            output = self._model.body(self._receive(x)).contiguous()
        dist.broadcast(output, dist.get_global_rank(self._group, 1), group=self._group)
        return output

    def partitioned_over(self, name: str, parameter: nn.Parameter) -> Sequence[str]:
        return ("pp",)

    def state_dict(self, state: dict[str, Any], engine: Engine) -> dict[str, Any]:
        whole = {}
        for name, shape in self._shapes.items():
            owner = int(int(name.split(".")[1]) >= self.cut)
            value = state["model"].get(name, torch.empty(shape)).detach().clone()
            dist.broadcast(value, dist.get_global_rank(self._group, owner), group=self._group)
            whole[name] = value
        return {**state, "model": whole}


class _Evaluation(nn.Module):
    def __init__(self, steps: nn.Module, plugin: ToyPipeline) -> None:
        super().__init__()
        self.steps = steps
        self._plugin = plugin

    def forward(self, step: str, batch: Any) -> Any:
        x, y = batch
        output = self._plugin.predict(x)
        return {"loss": nn.functional.cross_entropy(output, y), "output": output, "target": y}
