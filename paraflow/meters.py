"""Running means of losses and other scalars, weighted by the items they are over, without a wait in a step."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from paraflow.errors import ModelError
from paraflow.loss import StepOutput
from paraflow.mesh import Mesh
from paraflow.normaliser import weighted_sums
from paraflow.step import StepResult

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
        for key in ("loss", *_value_keys(self._pending)):
            total, weight = self._sums.get(key, (0.0, 0.0))
            more = _sums(self._pending, key).tolist()
            self._sums[key] = (total + more[0], weight + more[1])
        self._pending.clear()

    def compute(self) -> dict[str, float]:
        """Returns the means over all ranks: a collective."""
        return {key: total / weight if weight else float("nan") for key, (total, weight) in self._over_ranks().items()}

    def _over_ranks(self) -> dict[str, tuple[float, float]]:
        self._flush()
        keys = list(self._sums)
        require_same_keys(keys, self._mesh)
        if not keys:
            return {}
        sums = torch.tensor([self._sums[key] for key in keys], dtype=torch.float64)
        return {key: (pair[0], pair[1]) for key, pair in zip(keys, self._mesh.all_reduce(sums).tolist(), strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums over all ranks: a collective."""
        return {key: list(pair) for key, pair in self._over_ranks().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up sums that were saved; data rank 0 holds them, so that they count once."""
        self.reset()
        if self._mesh.data_rank == 0:
            self._sums = {key: (pair[0], pair[1]) for key, pair in state.items()}
        else:
            self._sums = dict.fromkeys(state, (0.0, 0.0))


def _value_keys(outputs: Sequence[StepOutput]) -> list[str]:
    """The names of the scalars beside the loss."""
    return list({key: None for output in outputs for key in output.values})


def _sums(outputs: Sequence[StepOutput], key: str) -> torch.Tensor:
    """The sums (weight × value, weight) of one scalar over the micro-batches that have it: shape [2]."""
    if key == "loss":
        return weighted_sums(outputs)
    having = [StepOutput(output.values[key], output.weight) for output in outputs if key in output.values]
    return weighted_sums(having)


def require_same_keys(keys: Sequence[str], mesh: Mesh) -> None:
    """Refuses scalars that only some ranks have: they could not be averaged.

    Raises:
        ModelError: Ranks have different scalars; raised on every rank.
    """
    if not mesh.agrees(zlib.crc32("\n".join(keys).encode())):
        raise ModelError(
            f"The ranks' steps returned different scalars; this one returned {', '.join(keys)}. Return the same keys, "
            "in the same order, in every step on every rank."
        )


def step_means(result: StepResult, mesh: Mesh) -> dict[str, torch.Tensor]:
    """Returns one step's means over its whole global batch, as 0-dim tensors: a collective.

    The loss is the one whose gradient the step followed, unscaled and undivided.
    """
    outputs = result.outputs
    if len(outputs) == 1 and mesh.data_ranks == 1:
        return {"loss": outputs[0].loss, **outputs[0].values}
    keys = _value_keys(outputs)
    if not keys and result.totals is not None:  # exchanged by the step itself
        return {"loss": result.totals[0] / result.totals[1]}
    if keys:
        require_same_keys(keys, mesh)
    device = outputs[0].loss.device
    sums = torch.stack([_sums(outputs, key).to(device) for key in ("loss", *keys)])
    total, weight = mesh.all_reduce(sums).unbind(1)
    return {key: total[place] / weight[place] for place, key in enumerate(("loss", *keys))}
