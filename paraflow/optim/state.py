"""An optimizer's state under the names of the model's parameters, so that any plan can take it up."""

from __future__ import annotations

from typing import Any

import torch

from paraflow.errors import CheckpointError
from paraflow.optim.update import Held, Update
from paraflow.parts import as_part, is_spread, local, part_for


def optimizer_state(update: Update) -> dict[str, Any]:
    """Returns the state by parameter name: ``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``.

    What belongs to a shard of a parameter is a sharded tensor, as the parameter is.
    """
    held = update.by_tensor
    groups = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [held[id(p)].name for p in group["params"]],
        }
        for group in update.optimizer.param_groups
    ]
    state = {
        held[id(tensor)].name: {key: _as_saved(value, held[id(tensor)]) for key, value in values.items()}
        for tensor, values in update.optimizer.state.items()
    }
    return {"state": state, "param_groups": groups}


def _as_saved(value: Any, held: Held) -> Any:
    if not isinstance(value, torch.Tensor) or is_spread(value) or not is_spread(held.parameter):
        return value
    return as_part(value, held.parameter) if value.dim() and value.shape == held.tensor.shape else value


def load_optimizer_state(update: Update, saved: dict[str, Any]) -> None:
    """Takes up a state that was saved by name, under whatever plan.

    Raises:
        CheckpointError: The optimizer's groups hold other parameters than those that were saved.
    """
    optimizer, held = update.optimizer, update.by_tensor
    mine = [[held[id(p)].name for p in group["params"]] for group in optimizer.param_groups]
    theirs = [group["params"] for group in saved["param_groups"]]
    if mine != theirs:
        raise CheckpointError(
            f"The checkpoint's optimizer has groups of {[len(group) for group in theirs]} parameters, and this one of "
            f"{[len(group) for group in mine]}, or they are in another order. Configure the optimizer as it was saved."
        )
    places = {name: place for place, name in enumerate(name for group in mine for name in group)}
    by_name = {one.name: one for one in update.held}
    numbered = {
        "state": {
            places[name]: {key: _as_held(value, by_name[name]) for key, value in values.items()}
            for name, values in saved["state"].items()
        },
        "param_groups": [
            {**group, **_implementation(here), "params": [places[name] for name in group["params"]]}
            for group, here in zip(saved["param_groups"], optimizer.param_groups, strict=True)
        ],
    }
    optimizer.load_state_dict(numbered)


def _as_held(value: Any, held: Held) -> Any:
    """What the optimizer keeps of a value: of one that is as large as the parameter, what belongs to what it holds."""
    if isinstance(value, (bool, int, float, str)) or value is None or not hasattr(value, "shape"):
        return value
    if len(value.shape) == 0 or tuple(value.shape) != tuple(held.parameter.shape):
        return part_for(value, torch.empty(0))
    part = part_for(value, held.parameter)
    return part if is_spread(held.tensor) else local(part)


def _implementation(group: dict[str, Any]) -> dict[str, Any]:
    """Which kernels run is this plan's choice, not the saved one's."""
    return {key: group[key] for key in ("foreach", "fused", "capturable") if key in group}
