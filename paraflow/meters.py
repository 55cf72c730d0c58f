"""Running means of losses and other scalars, weighted by the items they are over, without a wait in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paraflow.engine import StepResult
from paraflow.loss import StepOutput
from paraflow.mesh import Mesh

_KEEP = 1024


class MeanMeter:
    """The weighted mean of each scalar over all that was added, on all ranks.

    What is added stays on the device; it is summed when `_KEEP` micro-batches have come together, and exchanged when
    the mean is asked for.

    Args:
        mesh: The ranks the mean is over.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._pending: list[StepOutput] = []
        self._sums: dict[str, tuple[float, float]] = {}

    def reset(self) -> None:
        """Forgets everything."""
        self._pending.clear()
        self._sums.clear()

    def add(self, outputs: Sequence[StepOutput]) -> None:
        """Adds what micro-batches gave."""
        self._pending.extend(outputs)
        if len(self._pending) >= _KEEP:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        weights = _stack([output.weight for output in self._pending])
        self._accumulate("loss", _stack([output.loss for output in self._pending]), weights)
        for key in {key: None for output in self._pending for key in output.values}:
            having = [output for output in self._pending if key in output.values]
            values, of_those = _stack([o.values[key] for o in having]), _stack([o.weight for o in having])
            self._accumulate(key, values, of_those)
        self._pending.clear()

    def _accumulate(self, key: str, values: torch.Tensor, weights: torch.Tensor) -> None:
        # A stand-in weighs nothing, whatever its value is.
        weighted = torch.where(weights > 0, values * weights, 0.0).sum()
        total, weight = self._sums.get(key, (0.0, 0.0))
        self._sums[key] = (total + float(weighted), weight + float(weights.sum()))

    def compute(self) -> dict[str, float]:
        """Returns the means over all ranks: a collective."""
        self._flush()
        keys = list(self._sums)
        if not keys:
            return {}
        sums = torch.tensor([self._sums[key] for key in keys], dtype=torch.float64)
        if self._mesh.device.type == "cuda":
            sums = sums.to(self._mesh.device)
        means = self._mesh.all_reduce(sums)
        return {
            key: float(total / weight) if weight else float("nan")
            for key, (total, weight) in zip(keys, means.tolist(), strict=True)
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums over all ranks: a collective."""
        self._flush()
        keys = list(self._sums)
        sums = torch.tensor([self._sums[key] for key in keys], dtype=torch.float64)
        if keys:
            sums = self._mesh.all_reduce(sums.to(self._mesh.device) if self._mesh.device.type == "cuda" else sums)
        return {key: list(pair) for key, pair in zip(keys, sums.tolist(), strict=True)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up sums that were saved; data rank 0 holds them, so that they count once."""
        self.reset()
        if self._mesh.data_rank == 0:
            self._sums = {key: (pair[0], pair[1]) for key, pair in state.items()}
        else:
            self._sums = dict.fromkeys(state, (0.0, 0.0))


def _stack(values: Sequence[Any]) -> torch.Tensor:
    """Numbers and 0-dim tensors as one float64 tensor on the host."""
    if any(isinstance(value, torch.Tensor) for value in values):
        device = next(value.device for value in values if isinstance(value, torch.Tensor))
        stacked = torch.stack([torch.as_tensor(value, device=device).detach() for value in values])
        return stacked.cpu().double()
    return torch.tensor(values, dtype=torch.float64)


def step_means(result: StepResult, mesh: Mesh) -> dict[str, torch.Tensor]:
    """Returns one step's means over its whole global batch, as 0-dim tensors: a collective.

    The loss is the one whose gradient the step followed, unscaled and undivided.
    """
    outputs = result.outputs
    if len(outputs) == 1 and mesh.data_ranks == 1:
        return {"loss": outputs[0].loss, **outputs[0].values}
    keys = list({key: None for output in outputs for key in output.values})
    device = outputs[0].loss.device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    weights = torch.stack([torch.as_tensor(output.weight, device=device) for output in outputs]).to(dtype)
    columns = [weights] + [_column(outputs, key).to(dtype) * weights for key in ("loss", *keys)]
    sums = mesh.all_reduce(torch.where(weights > 0, torch.stack(columns), 0.0).sum(dim=1))
    return {key: sums[place] / sums[0] for place, key in enumerate(("loss", *keys), 1)}


def _column(outputs: Sequence[StepOutput], key: str) -> torch.Tensor:
    if key == "loss":
        return torch.stack([output.loss for output in outputs])
    device = outputs[0].loss.device
    return torch.stack([torch.as_tensor(output.values.get(key, 0.0), device=device) for output in outputs])
