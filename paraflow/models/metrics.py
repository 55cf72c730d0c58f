"""The metrics of a model, over every sample once, on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from paraflow.errors import ModelError
from paraflow.models.named_metrics import by_own_name, is_function, make_metric, update, update_by_name
from paraflow.tensor_parallel.split_logits import needs_all_ranks


class MetricSet:
    """Metrics that are updated batch by batch.

    A metric by name takes logits, and is made when the first output shows what it compares: two classes or many, and
    how many. A function (output, target) to a number counts as the mean over a batch's samples.

    Args:
        specs: Names, torchmetrics objects or functions; a mapping names them.
        device: Where they keep their state.
        group: The ranks whose samples count, or None for this one alone.
        probabilities: Whether outputs for two classes are probabilities and not logits.

    Raises:
        ModelError: A name is unknown or there twice, or a metric is of another kind.
    """

    def __init__(
        self,
        specs: Sequence[Any] | Mapping[str, Any],
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        *,
        probabilities: bool = False,
    ) -> None:
        self._specs = by_own_name(specs)
        if self._specs:
            import torchmetrics  # noqa: F401 (it takes seconds, which are not to be counted into the first epoch)
        self._device = device
        self._group = group
        self._probabilities = probabilities
        self._metrics: dict[str, Any] = {}
        self._saved: dict[str, list[dict[str, Any]]] = {}

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
                    self._update(self._metrics[name], name, spec, output, target, samples)
                else:
                    self._show(name, spec, output, target)

    def _update(self, metric: Any, name: str, spec: Any, output: Any, target: Any, samples: int) -> None:
        try:
            if is_function(spec):
                metric.update(spec(output, target), weight=samples)
            elif isinstance(spec, str):
                update_by_name(metric, spec, output, target, probabilities=self._probabilities)
            else:
                update(metric, output, target)
        except (ValueError, RuntimeError, IndexError) as error:
            raise ModelError(
                f"The metric {name!r} cannot compare an output of shape {_shape(output)} with a target of shape "
                f"{_shape(target)}: {error}"
            ) from error

    def _show(self, name: str, spec: Any, output: Any, target: Any) -> None:
        """Gives the empty lists of a metric, which are exchanged as they are, the dtype and shape of a batch's rows.

        Where ranks that have samples need this one to look at theirs, it does as they do.
        """
        empty = [part for part in _parts(self._metrics[name]) if any(v == [] for v in part.metric_state.values())]
        if not empty and not needs_all_ranks(output):
            return
        shown = self._build(spec, output, target)
        self._update(shown, name, spec, output, target, samples=1)
        for mine, seen in zip(_parts(self._metrics[name]), _parts(shown), strict=True):
            for key, value in seen.metric_state.items():
                if isinstance(value, list) and not getattr(mine, key):
                    setattr(mine, key, [part[:0] for part in value])

    def _build(self, spec: Any, output: Any, target: Any) -> Any:
        metric = make_metric(spec, output, target).to(self._device)
        for part in _parts(metric):
            part.process_group = self._group
            part._to_sync = part.sync_on_compute = self._group is not None
        return metric

    def compute(self) -> dict[str, float]:
        """Returns each metric over all samples since the last reset, on all ranks: a collective."""
        results: dict[str, float] = {}
        for name, metric in self._metrics.items():
            with _quiet():
                value = metric.compute()
            results.update(_as_numbers(name, value))
        return results

    def reset(self) -> None:
        """Begins anew."""
        self._saved = {}
        for metric in self._metrics.values():
            metric.reset()

    def state_dict(self) -> dict[str, Any]:
        """Returns what the metrics have seen so far, on all ranks: a collective."""
        state = {name: [self._seen(part) for part in _parts(metric)] for name, metric in self._metrics.items()}
        return {**self._saved, **state}

    def _seen(self, part: Any) -> dict[str, Any]:
        with (
            _quiet(),
            part.sync_context(should_sync=self._group is not None, distributed_available=lambda: True),
        ):
            return {key: _copied(value) for key, value in part.metric_state.items()}

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

    def _take_up(self, name: str) -> None:
        """Gives a metric the state that was saved of it."""
        for part, saved in zip(_parts(self._metrics[name]), self._saved.pop(name, []), strict=False):
            part._update_count = max(part._update_count, 1)
            for key, value in saved.items():
                values = [each.to(self._device) for each in (value if isinstance(value, list) else [value])]
                # A list of parts comes back from a synchronisation as one tensor.
                setattr(part, key, values if isinstance(part._defaults[key], list) else values[0])


def _parts(metric: Any) -> list[Any]:
    """The metrics of a collection, which may share state, or the metric itself."""
    return list(metric.values(copy_state=False)) if hasattr(metric, "compute_groups") else [metric]


@contextmanager
def _quiet() -> Iterator[None]:
    """A rank without a sample has nothing to add to the others', which is no mistake to warn of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
        yield


def _copied(value: Any) -> Any:
    """A state's tensor, or its list of tensors, which after a synchronisation may be one tensor."""
    return [part.detach().clone() for part in value] if isinstance(value, list) else value.detach().clone()


def _as_numbers(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        return {f"{name}_{key}": float(part) for key, part in value.items() if torch.as_tensor(part).numel() == 1}
    tensor = torch.as_tensor(value)
    if tensor.numel() == 1:
        return {name: float(tensor)}
    return {f"{name}_{index}": float(part) for index, part in enumerate(tensor.flatten())}


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
