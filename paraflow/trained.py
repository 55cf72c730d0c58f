"""Which parameters a module has and trains, and whether they are still those that were found first."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from paraflow.errors import ModelError


def trained_parts(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of a module's trainable parameters."""
    return tuple(name for name, parameter in module.named_parameters() if parameter.requires_grad)


def has_the_same(module: nn.Module, known: Mapping[str, nn.Parameter]) -> bool:
    """Whether a module has these parameters and no others, by name and identity."""
    now = dict(module.named_parameters())
    return now.keys() == known.keys() and all(now[name] is parameter for name, parameter in known.items())


def require_none_new(module: nn.Module, known: Mapping[str, nn.Parameter]) -> None:
    """Refuses parameters that came into being in the first step.

    Raises:
        ModelError: There are some: neither the optimizer nor other ranks know of them.
    """
    new = [name for name, parameter in module.named_parameters() if parameter.requires_grad and name not in known]
    if new:
        raise ModelError(
            f"{type(module).__name__} made parameters in its first step ({', '.join(new[:5])}), which the optimizer "
            "does not have: they would never be trained. Make them in __init__, or run one forward before fit."
        )
