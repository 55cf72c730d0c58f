"""The loops without gradients: evaluation and prediction. Each sample counts once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paraflow.data.batch import Batch, children, map_tensors
from paraflow.data.order import preserved_random_state
from paraflow.engine import Engine
from paraflow.errors import ModelError
from paraflow.mesh import Mesh
from paraflow.meters import MeanMeter
from paraflow.models.metrics import MetricSet
from paraflow.step import release_graph
from paraflow.tensor_parallel.split_logits import whole


@contextmanager
def inference(module: torch.nn.Module) -> Iterator[None]:
    """Runs a block in evaluation mode without gradients; modes and random state are as before afterwards."""
    modes = [(layer, layer.training) for layer in module.modules()]
    devices = [parameter.device for parameter in module.parameters() if parameter.is_cuda][:1]
    module.eval()
    try:
        with preserved_random_state(), torch.random.fork_rng(devices), torch.no_grad():
            yield
    finally:
        for layer, training in modes:
            layer.training = training


def evaluate(engine: Engine, batches: Iterable[Batch], metrics: MetricSet) -> dict[str, float]:
    """Returns the loss and metrics over all samples on all ranks: a collective."""
    meter = MeanMeter(engine.mesh)
    metrics.reset()
    with inference(engine.module):
        for batch in batches:
            for micro in batch.micro_batches:
                output = engine.eval_step(micro)
                metrics.update(output.output, output.target, micro.samples)
                release_graph(output, keep_output=False)
                meter.add([output])
    return {**meter.compute(), **metrics.compute()}


def predict(engine: Engine, batches: Iterable[Batch]) -> Any:
    """Returns the outputs for all samples, in their order, on every rank: a collective."""
    parts = []
    with inference(engine.module):
        for batch in batches:
            mine = [(whole(engine.predict_step(micro)), micro.samples) for micro in batch.micro_batches]
            rows = _concatenate([_rows(output, samples) for output, samples in mine])
            parts.append(_gathered(rows, batch.shares, engine.mesh))
    return _concatenate(parts)


def _rows(output: Any, samples: int) -> Any:
    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0 or (samples and tensor.shape[0] != samples):
            raise ModelError(
                f"predict_step returned a tensor of shape {tuple(tensor.shape)} for {samples} samples; return tensors "
                "whose first dimension is the sample."
            )
        return tensor[:samples]

    return map_tensors(keep, output)


def _gathered(output: Any, shares: tuple[int, ...], mesh: Mesh) -> Any:
    return map_tensors(lambda tensor: mesh.gather_rows(tensor, shares), output)


def _concatenate(parts: list[Any]) -> Any:
    """Joins outputs along the sample; containers are joined tensor by tensor."""
    if len(parts) == 1:
        return parts[0]
    columns = [list(_tensors(part)) for part in parts]
    try:
        joined = iter([torch.cat(column) for column in zip(*columns, strict=True)])
    except (RuntimeError, ValueError) as error:
        raise ModelError(
            f"The outputs of different batches cannot be joined: {error}. Return tensors from predict_step that agree "
            "in all dimensions but the first; pad what differs."
        ) from error
    return map_tensors(lambda _: next(joined), parts[0])


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
        return
    for child in children(output):
        yield from _tensors(child)
