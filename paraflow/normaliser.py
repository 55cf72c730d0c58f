"""Weights losses so that a step's gradient is that of the mean over its whole global batch.

Gradients are averaged over the data ranks, so micro-batch i of a rank starts backward from
``loss_i · weight_i · ranks / total``, where total is the sum of all weights. For samples the total is known before
anything runs. For items that a step counts itself (unmasked tokens) it is known only after the last forward; then
backward starts from an estimate of it, and the gradients are corrected once at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from paraflow.data.batch import Batch
from paraflow.loss import StepOutput
from paraflow.mesh import Mesh


class Normaliser:
    """Finds what each micro-batch's loss is multiplied by.

    The estimate is a power of two, and scaling by one rounds nothing, so results do not depend on it: it is found in
    the first step and kept.

    Args:
        mesh: The ranks the batch is divided over.

    Attributes:
        totals: The sums (weight × loss, weight) of the last step over all ranks, where they had to be exchanged; a
            tensor of shape [2], or None.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._estimate = 0.0
        self.totals: torch.Tensor | None = None

    def factor(self, output: StepOutput, batch: Batch) -> float | torch.Tensor:
        """Returns what a micro-batch's mean loss is multiplied by before backward."""
        ranks = self._mesh.data_ranks
        if not output.counted:
            self.totals = None
            return float(output.weight) * ranks / batch.samples
        if len(batch.micro_batches) > 1:
            return output.weight * (ranks / self._estimated_total(output, batch))
        if ranks == 1:
            self.totals = None
            return 1.0
        self.totals = self._mesh.all_reduce(_weighted([output]))
        share = output.weight * ranks / self.totals[1]
        return torch.where(self.totals[1] > 0, share, 0.0).to(output.loss.dtype)

    def correction(self, outputs: Sequence[StepOutput], batch: Batch) -> torch.Tensor | None:
        """Returns what the reduced gradients are multiplied by once, or None for nothing."""
        if len(batch.micro_batches) == 1 or not outputs[0].counted:
            return None
        self.totals = self._mesh.all_reduce(_weighted(outputs))
        share = self._estimate / self.totals[1]
        return torch.where(self.totals[1] > 0, share, 0.0).to(outputs[0].loss.dtype)

    def _estimated_total(self, output: StepOutput, batch: Batch) -> float:
        if not self._estimate:
            weight = torch.as_tensor(output.weight, dtype=torch.float32, device=output.loss.device).clone()
            total = float(self._mesh.all_reduce(weight)) * len(batch.micro_batches)
            self._estimate = 2.0 ** round(math.log2(max(total, 1.0)))
        return self._estimate


def _weighted(outputs: Sequence[StepOutput]) -> torch.Tensor:
    """The sums (weight × loss, weight) over this rank's micro-batches."""
    device = outputs[0].loss.device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    losses = torch.stack([output.loss.detach() for output in outputs]).to(dtype)
    weights = torch.stack([torch.as_tensor(output.weight, device=device) for output in outputs]).to(dtype)
    return torch.stack([(losses * weights).sum(), weights.sum()])
