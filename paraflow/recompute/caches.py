"""Caches of keys and values, which a model of transformers fills in forward unless it is told not to."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Caches:
    """Switches ``config.use_cache`` off while a model is trained, as transformers does under its own checkpointing.

    A cache is an argument that a block adds to: run again, it would add once more. Training never reads it.

    Args:
        module: The model; its parts may have a ``config`` of their own.
    """

    def __init__(self, module: nn.Module) -> None:
        found: list[Any] = [getattr(part, "config", None) for part in module.modules()]
        configs = {id(config): config for config in found if _is_of_transformers(config)}
        self._configs: list[Any] = list(configs.values())
        self._switched: list[list[Any]] = []

    def __enter__(self) -> None:
        switched = [config for config in self._configs if config.use_cache] if torch.is_grad_enabled() else []
        self._switched.append(switched)
        for config in switched:
            config.use_cache = False

    def __exit__(self, *error: Any) -> None:
        for config in self._switched.pop():
            config.use_cache = True


def _is_of_transformers(config: Any) -> bool:
    """Whether something is a configuration of transformers, and not an object of the user's that is called so."""
    modules = {kind.__module__.partition(".")[0] for kind in type(config).__mro__}
    return "transformers" in modules and hasattr(config, "use_cache")
