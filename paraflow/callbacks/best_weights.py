"""The weights that a measurement was of, and who may put weights in the model when a run ends."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from paraflow.callbacks.ema import EMA
from paraflow.callbacks.weight_averaging import StochasticWeightAveraging
from paraflow.checkpoint.stored import Stored
from paraflow.errors import ParaflowError
from paraflow.parts import Elsewhere, as_part, is_spread, local, part_for

if TYPE_CHECKING:
    import torch

    from paraflow.trainer import Trainer


def average_of(trainer: Trainer, monitored: str) -> EMA | None:
    """Returns the callback whose averages a metric is measured with, or None where it is of the raw weights."""
    averages = [callback for callback in trainer.callbacks if isinstance(callback, EMA) and callback.validate]
    return averages[0] if averages and monitored.startswith("val_") else None


def measured_weights(trainer: Trainer, monitored: str) -> dict[str, Any]:
    """Returns copies on the host of the weights that a metric was measured with, spread over ranks as they are.

    They are an EMA's averages where validation is of these.
    """
    average = average_of(trainer, monitored)
    with nullcontext() if average is None else average.averaged():
        return {name: _on_host(value) for name, value in trainer.engine.model_state().items()}


def read_weights(trainer: Trainer, weights: dict[str, Any]) -> dict[str, Any]:
    """Returns copies on the host of weights that a checkpoint holds: of those on disk what this rank has of each."""
    own = trainer.engine.model_state()
    return {
        name: _read(value, own[name]) if isinstance(value, Stored) and name in own else value
        for name, value in weights.items()
    }


def _read(value: Stored, own: torch.Tensor | Elsewhere) -> torch.Tensor | Elsewhere:
    return own if isinstance(own, Elsewhere) else _on_host(part_for(value, own.detach()))


def _on_host(weight: torch.Tensor | Elsewhere) -> torch.Tensor | Elsewhere:
    if isinstance(weight, Elsewhere):
        return weight
    weight = weight.detach()
    copied = local(weight).to("cpu", copy=True)
    return as_part(copied, weight) if is_spread(weight) else copied


def require_one_at_the_end(trainer: Trainer) -> None:
    """Refuses two callbacks that would both put weights in the model when the run ends.

    Raises:
        ParaflowError: There is another than the one that asks.
    """
    for other in trainer.callbacks:
        if isinstance(other, StochasticWeightAveraging) or (isinstance(other, EMA) and other.swap_at_end):
            raise ParaflowError(
                f"EarlyStopping(restore_best=True) and {type(other).__name__} would both put weights in the model when "
                "the run ends. Leave one of them out, or write EMA(swap_at_end=False)."
            )
