"""Metrics by name, by torchmetrics object or by function, over every sample once, on all ranks."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paraflow.errors import ModelError
from paraflow.models.losses import IGNORED

_CLASSIFICATION = {
    "accuracy": "Accuracy",
    "f1": "F1Score",
    "precision": "Precision",
    "recall": "Recall",
    "auroc": "AUROC",
}
_REGRESSION = {"mae": "MeanAbsoluteError", "mse": "MeanSquaredError", "r2": "R2Score"}
_AVERAGE = {"accuracy": "micro", "f1": "macro", "precision": "macro", "recall": "macro", "auroc": "macro"}


class MetricSet:
    """The metrics of a model, updated batch by batch.

    A metric by name is made when the first output shows what it compares: two classes or many, and how many. A function
    (output, target) to a number counts as the mean over a batch's samples.

    Args:
        specs: Names, torchmetrics objects or functions; a mapping names them.
        device: Where they keep their state.
        group: The ranks whose samples count, or None for this one alone.

    Raises:
        ModelError: A name is unknown, or a metric is of another kind.
    """

    def __init__(
        self, specs: Sequence[Any] | Mapping[str, Any], device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        self._specs = _named(specs)
        self._device = device
        self._group = group
        self._metrics: dict[str, Any] = {}
        self._saved: dict[str, dict[str, Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._specs)

    def update(self, output: Any, target: Any, samples: int) -> None:
        """Adds a batch; a stand-in (no samples) only shows what there is to compare.

        Raises:
            ModelError: The step returned no output or target, or a metric cannot compare them.
        """
        if not self._specs:
            return
        if output is None or target is None:
            raise ModelError(
                f"The metrics {', '.join(self._specs)} need what the model predicted: return a dict with 'loss', "
                "'output' and 'target' from the step, or leave the metrics out."
            )
        with torch.no_grad():
            for name, spec in self._specs.items():
                if name not in self._metrics:
                    self._metrics[name] = self._build(spec, output, target)
                    self._take_up(name)
                if samples:
                    self._update(name, spec, output, target, samples)

    def _update(self, name: str, spec: Any, output: Any, target: Any, samples: int) -> None:
        metric = self._metrics[name]
        try:
            if _is_function(spec):
                metric.update(spec(output, target), weight=samples)
            elif isinstance(spec, str):
                metric.update(*_aligned(spec, output, target))
            else:
                metric.update(output, target)
        except (ValueError, RuntimeError, IndexError) as error:
            raise ModelError(
                f"The metric {name!r} cannot compare an output of shape {_shape(output)} with a target of shape "
                f"{_shape(target)}: {error}"
            ) from error

    def _build(self, spec: Any, output: Any, target: Any) -> Any:
        import torchmetrics

        if _is_function(spec):
            metric = torchmetrics.MeanMetric()
        elif isinstance(spec, str):
            metric = _by_name(spec, *_aligned(spec, output, target))
        else:
            metric = spec.clone()
            metric.reset()
        metric = metric.to(self._device)
        if self._group is not None:
            metric.process_group = self._group
        metric._to_sync = metric.sync_on_compute = self._group is not None
        return metric

    def _take_up(self, name: str) -> None:
        """Gives a metric that has just been made the state that was saved of it."""
        metric = self._metrics[name]
        for key, value in self._saved.pop(name, {}).items():
            parts = value if isinstance(value, list) else [value]
            moved = [part.to(self._device) for part in parts]
            # A list of parts comes back from a synchronisation as one.
            setattr(metric, key, moved if isinstance(metric._defaults[key], list) else moved[0])
            metric._update_count = max(metric._update_count, 1)

    def state_dict(self) -> dict[str, Any]:
        """Returns what the metrics have seen so far, on all ranks: a collective."""
        state = {}
        for name, metric in self._metrics.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with metric.sync_context(should_sync=self._group is not None, distributed_available=lambda: True):
                    state[name] = {key: _copied(value) for key, value in metric.metric_state.items()}
        return {**self._saved, **state}

    def load_state_dict(self, state: Mapping[str, Any], *, first: bool) -> None:
        """Takes it up, once for all ranks.

        Args:
            state: What was saved.
            first: Whether this is the first data rank, which stands for what all had seen.
        """
        self.reset()
        self._saved = dict(state) if first else {}
        for name in list(self._saved):
            if name in self._metrics:
                self._take_up(name)

    def compute(self) -> dict[str, float]:
        """Returns each metric over all samples since the last reset, on all ranks: a collective."""
        results: dict[str, float] = {}
        for name, metric in self._metrics.items():
            with warnings.catch_warnings():
                # A rank without a sample has nothing to add to the others', which is no mistake.
                warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
                value = metric.compute()
            results.update(_as_numbers(name, value))
        return results

    def reset(self) -> None:
        """Begins anew."""
        self._saved = {}
        for metric in self._metrics.values():
            metric.reset()


def _copied(value: Any) -> Any:
    """A state's tensor, or its list of tensors, which after a synchronisation may be one tensor."""
    return [part.detach().clone() for part in value] if isinstance(value, list) else value.detach().clone()


def _named(specs: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(specs, Mapping):
        named = dict(specs)
    else:
        named = {}
        for spec in specs:
            name = spec if isinstance(spec, str) else _snake_case(getattr(spec, "__name__", type(spec).__name__))
            named[name] = spec
    for name, spec in named.items():
        _require_metric(name, spec)
    return named


def _require_metric(name: str, spec: Any) -> None:
    if isinstance(spec, str):
        known = [*_CLASSIFICATION, *_REGRESSION]
        if spec not in known:
            close = difflib.get_close_matches(spec, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ModelError(f"There is no metric named {spec!r}.{hint} The names are: {', '.join(known)}.")
        return
    if not callable(spec) or isinstance(spec, type):
        raise ModelError(
            f"The metric {name!r} must be a name, a torchmetrics object or a function (output, target), not {spec!r}."
        )


def _is_function(spec: Any) -> bool:
    return not isinstance(spec, str) and not (hasattr(spec, "update") and hasattr(spec, "compute"))


def _aligned(spec: str, output: Any, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Brings output and target to the shapes that the metric of a name takes."""
    if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor):
        raise ModelError(
            f"The metric {spec!r} compares tensors, and the step's output is a {type(output).__name__}, its target a "
            f"{type(target).__name__}. Give a function (output, target) instead."
        )
    if output.dim() == target.dim() + 1 and output.shape[-1] == 1:
        output = output.squeeze(-1)
    if spec in _REGRESSION:
        return output.detach().float(), target.float()
    if output.dim() == target.dim() + 1 and output.dim() > 2 and output.shape[:-1] == target.shape:
        output, target = output.flatten(0, -2), target.flatten()
    return output.detach(), target if output.dim() == target.dim() + 1 else target.int()


def _by_name(name: str, output: torch.Tensor, target: torch.Tensor) -> Any:
    import torchmetrics

    if name in _REGRESSION:
        return getattr(torchmetrics, _REGRESSION[name])()
    metric_class = getattr(torchmetrics, _CLASSIFICATION[name])
    if output.dim() == target.dim() + 1:
        return metric_class(
            task="multiclass",
            num_classes=output.shape[1],
            average=_AVERAGE[name],
            ignore_index=IGNORED if target.dim() > 1 or bool((target == IGNORED).any()) else None,
            validate_args=False,
        )
    return metric_class(task="binary", validate_args=False)


def _as_numbers(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        return {f"{name}_{key}": float(part) for key, part in value.items() if torch.as_tensor(part).numel() == 1}
    tensor = torch.as_tensor(value)
    if tensor.numel() == 1:
        return {name: float(tensor)}
    return {f"{name}_{index}": float(part) for index, part in enumerate(tensor.flatten())}


def _snake_case(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
