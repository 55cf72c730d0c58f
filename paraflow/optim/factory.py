"""Optimizers by name, by class, by function or ready-made."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from paraflow.errors import ModelError
from paraflow.optim.stand_ins import hold_the_models_own

OptimizerChoice = str | Optimizer | Callable[..., Optimizer]
Groups = list[dict[str, Any]]


def build_optimizer(
    choice: OptimizerChoice,
    named_parameters: Iterable[tuple[str, Parameter]],
    *,
    lr: float,
    weight_decay: float | None = None,
    is_stage: bool = False,
    **options: Any,
) -> Optimizer:
    """Make the optimizer of a model's trainable parameters.

    Frozen parameters are left out, and a parameter with two names (tied weights) is held once. If `weight_decay` is
    given and positive, it is applied to matrices and tensors of more dimensions alone; biases and norm weights, which
    have one dimension, go to a second group without it, as is usual for transformers. If it is None, there is one
    group and the optimizer's own default holds.

    Args:
        choice: The name of a class in `torch.optim`, in any case ("adamw", "sgd", ...); or an optimizer class; or a
            function of the parameters, which is given `lr` and `weight_decay` where it takes them; or an optimizer.
        named_parameters: What `model.named_parameters()` gives.
        lr: Learning rate; the peak of the schedule if there is one.
        weight_decay: Weight decay, or None for the optimizer's own default.
        is_stage: Whether other ranks hold further parameters of the model: the groups are those of the whole then,
            though one may be empty here.
        **options: Further keyword arguments of the optimizer, such as `betas` or `momentum`.

    Returns:
        The optimizer. One that was given ready-made is returned as it is.

    Raises:
        ModelError: If the name or an option is not known, nothing is trainable, or the optimizer cannot update this
            model.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = build_optimizer("AdamW", model.named_parameters(), lr=1e-3, weight_decay=0.1)
        >>> [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups]
        [(1, 0.1), (1, 0.0)]
    """
    named = list(named_parameters)
    if isinstance(choice, Optimizer):
        return _check_ready_made(choice, [parameter for _, parameter in named])
    trainable = _trainable(named, is_stage=is_stage)
    make = _class_named(choice) if isinstance(choice, str) else choice
    _check_parameters(make, trainable)
    groups = _groups([parameter for _, parameter in trainable], weight_decay, keep_empty=is_stage)
    arguments = {**_known_arguments(make, lr, weight_decay), **options}
    _check_options(make, weight_decay, options)
    optimizer = make(groups, **arguments)
    if not isinstance(optimizer, Optimizer):
        raise ModelError(
            f"The optimizer function {_name(make)} returned a {type(optimizer).__name__}; return a "
            "torch.optim.Optimizer."
        )
    return optimizer


def optimizer_names() -> list[str]:
    """The names that `build_optimizer` takes, sorted.

    Example:
        >>> "adamw" in optimizer_names(), "lbfgs" in optimizer_names()
        (True, False)
    """
    return sorted(set(_classes()) - {"lbfgs"})


def _classes() -> dict[str, type[Optimizer]]:
    return {
        name.lower(): found
        for name, found in vars(torch.optim).items()
        if inspect.isclass(found) and issubclass(found, Optimizer) and found is not Optimizer
    }


def _class_named(name: str) -> type[Optimizer]:
    if name.lower() == "lbfgs":
        raise ModelError(
            "L-BFGS evaluates the loss several times a step through a closure, which a Trainer that divides a batch "
            "over "
            'micro-batches and ranks does not offer; choose another optimizer, such as "adamw".'
        )
    found = _classes().get(name.lower())
    if found is not None:
        return found
    names = optimizer_names()
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f' Did you mean "{close[0]}"?' if close else ""
    raise ModelError(f'No optimizer is called "{name}".{hint} The names are {", ".join(names)}.')


def _trainable(named: list[tuple[str, Parameter]], *, is_stage: bool) -> list[tuple[str, Parameter]]:
    """Names and parameters that require a gradient, each parameter once."""
    unique = {id(parameter): (name, parameter) for name, parameter in reversed(named) if parameter.requires_grad}
    if not unique and not is_stage:
        state = "all are frozen" if named else "it has none at all"
        raise ModelError(
            f"The model has no trainable parameter: {state}. Give it layers with parameters, or set requires_grad=True."
        )
    return list(reversed(unique.values()))


def _groups(parameters: list[Parameter], weight_decay: float | None, *, keep_empty: bool) -> Groups:
    if not weight_decay:
        return [{"params": parameters}]
    decayed = [parameter for parameter in parameters if parameter.ndim > 1]
    others = [parameter for parameter in parameters if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"] or keep_empty]


def _keywords(make: Callable[..., Optimizer]) -> dict[str, inspect.Parameter]:
    """The keyword arguments that `make` takes after the parameters, less those that a partial has already fixed."""
    keywords = dict(list(inspect.signature(make).parameters.items())[1:])
    fixed = make.keywords if isinstance(make, functools.partial) else {}
    return {name: keyword for name, keyword in keywords.items() if name not in fixed}


def _known_arguments(make: Callable[..., Optimizer], lr: float, weight_decay: float | None) -> dict[str, Any]:
    keywords = _keywords(make)
    values = {"lr": lr} if weight_decay is None else {"lr": lr, "weight_decay": weight_decay}
    return {name: value for name, value in values.items() if name in keywords}


def _check_options(make: Callable[..., Optimizer], weight_decay: float | None, options: dict[str, Any]) -> None:
    keywords = _keywords(make)
    takes_any = any(keyword.kind is inspect.Parameter.VAR_KEYWORD for keyword in keywords.values())
    if isinstance(make, type) and weight_decay and "weight_decay" not in keywords:
        raise ModelError(f"{_name(make)} has no weight decay; leave weight_decay out, or choose another optimizer.")
    unknown = sorted(set(options) - set(keywords))
    if unknown and not takes_any:
        taken = ", ".join(sorted(keywords))
        raise ModelError(f"{_name(make)} has no option called {', '.join(unknown)}; its options are {taken}.")


def _check_parameters(make: Callable[..., Optimizer], trainable: list[tuple[str, Parameter]]) -> None:
    """Muon orthogonalises matrices: torch's class refuses all else, without saying what to do instead."""
    if make is not _classes().get("muon"):
        return
    others = [name for name, parameter in trainable if parameter.ndim != 2]
    if others:
        shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise ModelError(
            f"Muon updates matrices only, and {len(others)} trainable parameters are none ({shown}). Freeze them, or "
            "choose another optimizer; to update them by a second one, override configure_optimizers."
        )


def _check_ready_made(optimizer: Optimizer, parameters: list[Parameter]) -> Optimizer:
    hold_the_models_own(optimizer)
    own = {id(parameter) for parameter in parameters}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = [parameter for parameter in held if id(parameter) not in own]
    if foreign and len(foreign) < len(held):
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in foreign[:5])
        raise ModelError(
            f"The {type(optimizer).__name__} that was given also holds parameters that are not this model's, of shapes "
            f"{shapes}; ranks could not keep them alike, nor a checkpoint hold them. Make them a part of the model."
        )
    if foreign:
        raise ModelError(
            f"The {type(optimizer).__name__} that was given holds {len(held)} parameters and none is one of this "
            "model's; "
            'make it from model.parameters() of the same model, or give a name such as "adamw" instead.'
        )
    if type(optimizer) is torch.optim.LBFGS:
        _class_named("lbfgs")
    return optimizer


def _name(make: Callable[..., Optimizer]) -> str:
    return getattr(make, "__name__", None) or repr(make)
