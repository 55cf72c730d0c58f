"""An optimizer's state under the names of the model's parameters, so that any plan can take it up."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paraflow.errors import CheckpointError


def optimizer_state(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Any]:
    """Returns the state by parameter name: ``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [names[id(p)] for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    state = {names[id(parameter)]: dict(values) for parameter, values in optimizer.state.items()}
    return {"state": state, "param_groups": groups}


def load_optimizer_state(optimizer: torch.optim.Optimizer, module: nn.Module, saved: dict[str, Any]) -> None:
    """Takes up a state that was saved by name.

    Raises:
        CheckpointError: The optimizer's groups hold other parameters than those that were saved.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    mine = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    theirs = [group["params"] for group in saved["param_groups"]]
    if mine != theirs:
        raise CheckpointError(
            f"The checkpoint's optimizer has groups of {[len(group) for group in theirs]} parameters, and this one of "
            f"{[len(group) for group in mine]}, or they are in another order. Configure the optimizer as it was saved."
        )
    places = {name: place for place, name in enumerate(name for group in mine for name in group)}
    numbered = {
        "state": {places[name]: dict(values) for name, values in saved["state"].items()},
        "param_groups": [
            {**group, **_implementation(here), "params": [places[name] for name in group["params"]]}
            for group, here in zip(saved["param_groups"], optimizer.param_groups, strict=True)
        ],
    }
    optimizer.load_state_dict(numbered)


def _implementation(group: dict[str, Any]) -> dict[str, Any]:
    """Which kernels run is this plan's choice, not the saved one's."""
    return {key: group[key] for key in ("foreach", "fused", "capturable") if key in group}
