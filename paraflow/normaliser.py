"""Weights losses so that a step's gradient is that of the mean over its whole global batch.

Gradients are averaged over the data ranks, so micro-batch i of a rank starts backward from
``loss_i · weight_i · ranks / total``, where total is the sum of all weights. For samples the total is known before
anything runs. For items that a step counts itself (unmasked tokens) it is known only after the last forward; then
backward starts from an estimate of it, and the gradients are corrected once at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paraflow.data.batch import Batch
from paraflow.loss import StepOutput
from paraflow.mesh import Mesh


class Normaliser:
    """Finds what each micro-batch's loss is multiplied by.

    The estimate is a power of two near what the first micro-batches of all ranks foretell, or the step before. Scaling
    by one rounds nothing, so results do not depend on it; it only keeps 16-bit gradients in range.

    Args:
        mesh: The ranks the batch is divided over.

    Attributes:
        totals: The sums (weight × loss, weight) of the last step over all ranks, where they had to be exchanged; a
            tensor of shape [2], or None.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._last_total: torch.Tensor | None = None
        self._estimate: torch.Tensor | None = None
        self.totals: torch.Tensor | None = None

    def begin(self, batch: Batch) -> None:
        """Makes ready for a step."""
        self.totals = None
        self._estimate = None

    def factor(self, output: StepOutput, batch: Batch) -> float | torch.Tensor:
        """Returns what a micro-batch's mean loss is multiplied by before backward."""
        ranks = self._mesh.data_ranks
        if not output.counted:
            return float(output.weight) * ranks / batch.samples
        if len(batch.micro_batches) > 1:
            return (output.weight * (ranks / self._estimated_total(output, batch))).to(output.loss.dtype)
        if ranks == 1:
            return 1.0
        if self.totals is None:  # a forward that is run again in the same step must not exchange again
            self.totals = self._mesh.all_reduce(weighted_sums([output]))
        share = output.weight * ranks / self.totals[1]
        return torch.where(self.totals[1] > 0, share, 0.0).to(output.loss.dtype)

    def correction(self, outputs: Sequence[StepOutput], batch: Batch) -> torch.Tensor | None:
        """Returns what the reduced gradients are multiplied by once, or None for nothing."""
        if len(batch.micro_batches) == 1 or not outputs[0].counted:
            return None
        estimate = self._estimated_total(outputs[0], batch)  # a rank that has weighed no loss makes it here
        self.totals = self._mesh.all_reduce(weighted_sums(outputs))
        self._last_total = self.totals[1]
        share = estimate / self.totals[1]
        return torch.where(self.totals[1] > 0, share, 0.0).to(outputs[0].loss.dtype)

    def _estimated_total(self, output: StepOutput, batch: Batch) -> torch.Tensor:
        if self._estimate is None:
            first = self._mesh.all_reduce(stack_numbers([output.weight], output.loss.device))[0]
            total = (first * len(batch.micro_batches)).clamp(min=batch.samples)
            if self._last_total is not None:
                total = torch.maximum(total, self._last_total)
            self._estimate = total.log2().round().exp2()
        return self._estimate


_MANY = 16


def sum_dtype(device: torch.device) -> torch.dtype:
    """The dtype that sums are taken in: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def stack_numbers(values: Sequence[float | torch.Tensor], device: torch.device) -> torch.Tensor:
    """Returns numbers and 0-dim tensors as one tensor on a device; a few numbers are filled in there, not copied."""
    dtype = sum_dtype(device)
    if all(isinstance(value, torch.Tensor) for value in values):
        return torch.stack(list(values)).detach().to(device, dtype)  # type: ignore[arg-type]
    if len(values) > _MANY and not any(isinstance(value, torch.Tensor) for value in values):
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.stack(
        [
            value.detach().to(device, dtype)
            if isinstance(value, torch.Tensor)
            else torch.full((), value, dtype=dtype, device=device)
            for value in values
        ]
    )


def weighted_sums(outputs: Sequence[StepOutput]) -> torch.Tensor:
    """Returns the sums (weight × loss, weight) over this rank's micro-batches: shape [2]."""
    device = outputs[0].loss.device
    losses = stack_numbers([output.loss for output in outputs], device)
    weights = stack_numbers([output.weight for output in outputs], device)
    return torch.stack([torch.where(weights > 0, losses * weights, 0.0).sum(), weights.sum()])
