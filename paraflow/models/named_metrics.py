"""Metrics by name, made of torchmetrics once an output shows what there is to compare."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paraflow.errors import ModelError
from paraflow.models.losses import IGNORED
from paraflow.tensor_parallel.split_logits import SplitLogits, whole

_CLASSIFICATION = {
    "accuracy": ("Accuracy", "micro"),
    "f1": ("F1Score", "macro"),
    "precision": ("Precision", "macro"),
    "recall": ("Recall", "macro"),
    "auroc": ("AUROC", "macro"),
}
_REGRESSION = {"mae": "MeanAbsoluteError", "mse": "MeanSquaredError", "r2": "R2Score"}


def by_own_name(specs: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """Returns metrics by the name under which they are logged.

    Args:
        specs: Names, torchmetrics objects or functions (output, target); a mapping names them.

    Raises:
        ModelError: A name is unknown or there twice, or a metric is of another kind.

    Example:
        >>> list(by_own_name(["accuracy", torch.dist]))
        ['accuracy', 'dist']
    """
    if isinstance(specs, Mapping):
        named = dict(specs)
    else:
        names = [_name_of(spec) for spec in specs]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise ModelError(
                f"Two metrics are named {repeated!r}; give each a name: metrics={{'first': ..., 'second': ...}}."
            )
        named = dict(zip(names, specs, strict=True))
    for name, spec in named.items():
        _require_metric(name, spec)
    return named


def is_function(spec: Any) -> bool:
    """Whether a metric is a plain function of (output, target)."""
    return not isinstance(spec, str) and not (hasattr(spec, "update") and hasattr(spec, "compute"))


def make_metric(spec: Any, output: Any, target: Any) -> Any:
    """Returns a fresh torchmetrics metric for a spec, given the first output and target.

    Raises:
        ModelError: A metric by name cannot compare the two.
    """
    import torchmetrics

    if is_function(spec):
        return torchmetrics.MeanMetric()
    if not isinstance(spec, str):
        fresh = spec.clone()
        fresh.reset()
        return fresh
    if spec in _REGRESSION:
        return getattr(torchmetrics, _REGRESSION[spec])()
    output, target = aligned(spec, output, target)
    class_name, average = _CLASSIFICATION[spec]
    metric_class = getattr(torchmetrics, class_name)
    if output.dim() == target.dim():
        return metric_class(task="binary", ignore_index=IGNORED, validate_args=False)
    return metric_class(
        task="multiclass",
        num_classes=output.shape[1],
        average=average,
        ignore_index=IGNORED,
        validate_args=False,
    )


def aligned(spec: str, output: Any, target: Any, *, probabilities: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Brings output and target to what the metric of a name takes.

    Outputs are logits: two classes have one logit a sample, more have one a class, in dimension 1 as in torch or in the
    last as in language models. Those of two classes become probabilities here, because torchmetrics would guess from
    each batch's values whether they are.

    Args:
        spec: The name.
        output: What the model predicted.
        target: What was to be predicted.
        probabilities: Whether outputs for two classes are probabilities already, as after a sigmoid.

    Raises:
        ModelError: They are not tensors, or the target holds no classes.
    """
    if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor):
        raise ModelError(
            f"The metric {spec!r} compares tensors, and the step's output is a {type(output).__name__}, its target a "
            f"{type(target).__name__}. Give a function (output, target) instead."
        )
    output = output.detach()
    if output.dim() == target.dim() + 1 and output.shape[-1] == 1:
        output = output.squeeze(-1)
    if spec in _REGRESSION:
        return output.float(), target.float()
    if output.dim() == target.dim() + 1 and output.dim() > 2 and output.shape[:-1] == target.shape:
        output, target = output.flatten(0, -2), target.flatten()
    if output.dim() == target.dim():
        _require_classes(spec, target)
        scores = output.sigmoid() if output.is_floating_point() and not probabilities else output
        return scores, target.int()
    return output, target


def update_by_name(metric: Any, spec: str, output: Any, target: Any, *, probabilities: bool = False) -> None:
    """Adds a batch to the metric of a name; see `aligned`.

    Raises:
        ModelError: They are not tensors, or the target holds no classes.
    """
    output, target = aligned(spec, output, target, probabilities=probabilities)
    if spec == "auroc" and output.dim() == target.dim() + 1:
        output = whole(output).softmax(1)
    update(metric, output, target)


def update(metric: Any, output: Any, target: Any) -> None:
    """Adds a batch to a torchmetrics metric.

    Of logits that are split over ranks those that look at the highest only are given these, as whole numbers; for
    others they are joined.

    Args:
        metric: The metric.
        output: What the model predicted.
        target: What was to be predicted.
    """
    if not isinstance(output, SplitLogits):
        metric.update(output, target)
        return
    from torchmetrics.classification import MulticlassAccuracy, MulticlassStatScores

    by_class = isinstance(metric, MulticlassStatScores) and metric.multidim_average == "global"
    if not by_class or output.dim() != 2 or target.dim() != 1:
        metric.update(output.whole(), target)
    elif metric.top_k == 1:
        metric.update(output.argmax(-1), target)
    elif isinstance(metric, MulticlassAccuracy) and metric.average == "micro":
        _update_top(metric, output, target)
    else:
        metric.update(output.whole(), target)


def _update_top(metric: Any, output: SplitLogits, target: torch.Tensor) -> None:
    """A class among the first k is as good as the first, which is how torchmetrics counts.

    The metric then counts for each class what it would for all: the share that it gives is the same.
    """
    highest, metric.top_k = metric.top_k, 1
    try:
        first = output.topk(highest).indices
        among = (first == target[:, None]).any(1)
        metric.update(torch.where(among, target, first[:, 0]), target)
    finally:
        metric.top_k = highest


def _require_classes(spec: str, target: torch.Tensor) -> None:
    if target.is_floating_point() and not bool(((target == 0) | (target == 1) | (target == IGNORED)).all()):
        raise ModelError(
            f"The metric {spec!r} compares with classes, and the target holds numbers between them, such as the "
            "probabilities of soft labels. Give a function (output, target), such as one that takes the argmax of both."
        )


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


def _name_of(spec: Any) -> str:
    name = spec if isinstance(spec, str) else getattr(spec, "__name__", type(spec).__name__)
    return "".join(f"_{c.lower()}" if c.isupper() and place else c.lower() for place, c in enumerate(name))
