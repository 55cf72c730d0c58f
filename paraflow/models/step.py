"""The step of a module that brings none of its own: call it, take the loss, count what the loss is over."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional

from paraflow.errors import ModelError
from paraflow.models.losses import IGNORED
from paraflow.models.recipe import recipe_of
from paraflow.tensor_parallel.split_logits import needs_all_ranks

_TARGET_KEYS = ("labels", "label", "targets", "target", "y")


def supervised_step(module: nn.Module, loss: Callable[[Any, Any], Any] | None, batch: Any) -> dict[str, Any]:
    """Runs a module on a batch and returns its loss by the contract of `paraflow.loss`.

    The batch is ``(inputs..., target)``, or a mapping (or dataclass) with the target under ``labels`` or ``target``.

    Args:
        module: The module to run.
        loss: From (output, target) to the loss; None for a module whose output has a ``loss``, as in transformers,
            which is given the whole batch.
        batch: The micro-batch.

    Raises:
        ModelError: There is no loss, or no target for it.
    """
    result = _own_loss(module, batch) if loss is None else _apply_loss(module, loss, batch)
    weight = recipe_of(module).weight
    return result if weight is None else {**result, "weight": weight(batch)}


def _apply_loss(module: nn.Module, loss: Callable[[Any, Any], Any], batch: Any) -> dict[str, Any]:
    args, kwargs, target = split_batch(batch)
    if target is None:
        raise ModelError(
            f"The batch ({_describe(batch)}) has no target for the loss: give (inputs, target), or a mapping with "
            f"one of {', '.join(_TARGET_KEYS)}, or override training_step."
        )
    output = _call(module, args, kwargs, batch)
    return {"loss": loss(output, target), "output": output, "target": target}


def split_batch(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Returns (positional inputs, inputs by name, target) of a batch; the target is None where there is none.

    Example:
        >>> split_batch((1, 2, 3))
        ((1, 2), {}, 3)
        >>> split_batch({"x": 1, "labels": 2})
        ((), {'x': 1}, 2)
    """
    if isinstance(batch, (tuple, list)):
        return (tuple(batch[:-1]), {}, batch[-1]) if len(batch) > 1 else (tuple(batch), {}, None)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        batch = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    if isinstance(batch, Mapping):
        key = next((key for key in _TARGET_KEYS if key in batch), None)
        return (), {k: v for k, v in batch.items() if k != key}, None if key is None else batch[key]
    return (batch,), {}, None


def call_with_inputs(module: nn.Module, batch: Any) -> Any:
    """Runs a module on a batch's inputs, as prediction does; transformers' outputs give their logits."""
    args, kwargs, _ = split_batch(batch)
    output = _call(module, args, kwargs, batch)
    logits = getattr(output, "logits", None)
    return output if logits is None else logits


def _own_loss(module: nn.Module, batch: Any) -> dict[str, Any]:
    loss, logits, labels = loss_and_logits(module, batch)
    result: dict[str, Any] = {"loss": loss}
    if isinstance(labels, torch.Tensor) and labels.dim() > 1 and not labels.is_floating_point():
        if module not in _SHIFTS and not _has_values(loss):
            raise ShiftUnknown(module, batch)
        shifted = shifts_labels(module, loss, logits, labels)
        labels = labels[..., 1:] if shifted else labels
        logits = logits[..., :-1, :] if shifted and isinstance(logits, torch.Tensor) else logits
        result["weight"] = (labels != IGNORED).sum()
    return {**result, "output": logits, "target": labels}


def loss_and_logits(module: nn.Module, batch: Any) -> tuple[torch.Tensor, Any, Any]:
    """Runs a module whose output has a loss on a batch, and returns its loss, its logits and the batch's labels.

    Raises:
        ModelError: There is no loss.
    """
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        batch = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    if isinstance(batch, Mapping):
        output = _call(module, (), dict(batch), batch)
    else:
        output = _call(module, tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {}, batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        raise ModelError(
            f"{type(module).__name__} has no loss: its output ({type(output).__name__}) has none for this batch "
            f"({_describe(batch)}). Say one with configure(loss='cross_entropy'), or override training_step."
        )
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return loss, logits, labels


class ShiftUnknown(Exception):
    """Whether a model shifts its labels shows in values, and this rank has none: see `shifts_labels`.

    Attributes:
        module: The model.
        batch: What it was run on.
    """

    def __init__(self, module: nn.Module, batch: Any) -> None:
        super().__init__(f"whether {type(module).__name__} shifts its labels is not known")
        self.module, self.batch = module, batch


def _has_values(loss: torch.Tensor) -> bool:
    from paraflow.pipelining.absent import Absent

    return not isinstance(loss, Absent)


def _call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any) -> Any:
    """Calls a module; what does not fit its forward is said in terms of the batch.

    Raises:
        ModelError: Its forward does not take the batch's inputs.
    """
    try:
        return module(*args, **kwargs)
    except TypeError as error:
        signature = inspect.signature(module.forward)
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            name = type(module).__name__
            given = ", ".join(kwargs) if kwargs else f"{len(args)} input{'s' if len(args) > 1 else ''}"
            raise ModelError(
                f"{name}.forward{signature} does not take what the batch ({_describe(batch)}) gives: {given}. A batch "
                "is (inputs..., target), or a mapping with its target under 'labels' or 'target'. If there is no loss "
                "yet, say one: configure(loss=...). For anything else, override training_step."
            ) from error
        raise


def shifts_labels(module: nn.Module, loss: torch.Tensor, logits: Any, labels: torch.Tensor) -> bool:
    """Whether a transformers model shifts its labels: its loss is then a mean over all but the first of each row.

    The first loss is compared with both; where neither fits (label smoothing, auxiliary losses), or no label is there,
    the name of the model's class decides.
    """
    if module not in _SHIFTS:
        found = _found_shift(loss, logits, labels)
        if found is None:
            return _is_causal_by_name(module)
        _SHIFTS[module] = found
    return _SHIFTS[module]


def remember_shift(module: nn.Module, shifts: bool) -> None:
    """Notes whether a model shifts its labels, as another rank has found out."""
    _SHIFTS[module] = shifts


_SHIFTS: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def _found_shift(loss: torch.Tensor, logits: Any, labels: torch.Tensor) -> bool | None:
    if not isinstance(logits, torch.Tensor) or logits.shape[:-1] != labels.shape:
        return None
    if needs_all_ranks(logits):
        return None  # other ranks may have found it out already, and not be here
    with torch.no_grad():
        pairs = {True: (logits[..., :-1, :], labels[..., 1:]), False: (logits, labels)}
        fitting = [
            shifted for shifted, pair in pairs.items() if torch.isclose(_token_mean(*pair), loss.float(), rtol=1e-5)
        ]
    return fitting[0] if len(fitting) == 1 else None


def _token_mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED)


def _is_causal_by_name(module: nn.Module) -> bool:
    inner = getattr(module, "_orig_mod", module)  # what torch.compile wraps
    if getattr(getattr(inner, "config", None), "is_encoder_decoder", False):
        return False
    return any(mark in type(inner).__name__ for mark in ("CausalLM", "LMHead", "DoubleHeads"))


def _describe(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return "a mapping with " + ", ".join(map(str, batch))
    if isinstance(batch, (tuple, list)):
        return f"a {type(batch).__name__} of {len(batch)}"
    return f"a {type(batch).__name__}"
