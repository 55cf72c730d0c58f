"""The statistics of batch normalisation, measured anew for weights that no training step has run with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from paraflow.callbacks.rerun import forward_again, undisturbed
from paraflow.data import Feed
from paraflow.mesh import Mesh

if TYPE_CHECKING:
    from paraflow.trainer import Trainer


class _Statistics:
    """The sums of one layer's batch statistics, weighted by samples, in float64."""

    def __init__(self, layer: _BatchNorm) -> None:
        assert layer.running_mean is not None
        assert layer.running_var is not None
        self.layer = layer
        self.mean, self.var = layer.running_mean, layer.running_var
        self.samples = 0  # of the micro-batch that is run
        self.sums = torch.zeros(2 * self.mean.numel() + 1, dtype=torch.float64, device=self.mean.device)

    def note(self, *_: Any) -> None:
        """Adds what the layer has just measured; with a momentum of 1 its statistics are those of this batch alone."""
        if self.samples:
            batch = torch.cat([self.mean, self.var, torch.ones_like(self.mean[:1])])
            self.sums.add_(batch, alpha=self.samples)

    @torch.no_grad()
    def keep(self, mesh: Mesh) -> None:
        """Gives the layer the means over all ranks' samples: a collective."""
        sums = mesh.all_reduce(self.sums)
        if sums[-1] > 0:
            mean, var = (sums[:-1] / sums[-1]).chunk(2)
            self.mean.copy_(mean)
            self.var.copy_(var)


def measure_batch_norm(trainer: Trainer, most_batches: int | None = None) -> tuple[int, int]:
    """Measures anew the running statistics of all batch normalisation in training mode, over the training data.

    One pass of the forward of the training step, without gradients; position in the data, random state and all else in
    the model stay as they are. Each layer's mean and variance become the means over the micro-batches of all ranks,
    weighted by their samples: what torch's ``update_bn`` gives where batches are of one size. The variance is the mean
    of the variances within micro-batches, so it depends a little on their size.

    Args:
        trainer: The trainer, at the end of a fit; every rank calls this: a collective.
        most_batches: After how many batches to stop; None reads one epoch.

    Returns:
        The number of layers, and of samples over all ranks that were read.
    """
    engine, run = trainer.engine, trainer.run
    layers = [part for part in engine.module.modules() if isinstance(part, _BatchNorm)]
    measured = [_Statistics(layer) for layer in layers if layer.training and layer.running_mean is not None]
    if not measured:
        return 0, 0
    feed, samples = Feed(run.feed.source, run.feed.reader, engine.mesh.device, "training data"), 0
    feed.epoch = trainer.current_epoch
    momenta = [statistics.layer.momentum for statistics in measured]
    hooks = [statistics.layer.register_forward_hook(statistics.note) for statistics in measured]
    try:
        with undisturbed(engine), torch.no_grad():
            for statistics in measured:
                statistics.layer.momentum = 1.0
                statistics.layer.reset_running_stats()  # what is not finite would stay so
            for number, batch in enumerate(feed, start=1):
                for micro in batch.micro_batches:
                    for statistics in measured:
                        statistics.samples = micro.samples
                    forward_again(engine, micro.data)
                samples += batch.samples
                if number == most_batches:
                    break
    finally:
        for hook in hooks:
            hook.remove()
        for statistics, momentum in zip(measured, momenta, strict=True):
            statistics.layer.momentum = momentum
    for statistics in measured:
        statistics.keep(engine.mesh)
    return len(measured), samples
