"""An optimizer's state under the names of the model's parameters, so that any plan can take it up."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paraflow.errors import CheckpointError
from paraflow.optim.held import Held, changed
from paraflow.optim.stand_ins import alone
from paraflow.optim.update import Update
from paraflow.parts import as_part, cut, is_spread, local, map_values, part_for, whole

MASTER = "master_weight"
"""What a state has of a parameter whose optimizer holds it with more digits than the model does."""


def optimizer_state(update: Update) -> dict[str, Any]:
    """Returns the state by parameter name: ``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``.

    What belongs to a shard of a parameter is a sharded tensor, as the parameter is. What an optimizer keeps under a
    name of its own, and not for a parameter, is there as ``"own"``.

    Raises:
        CheckpointError: It keeps something for what is neither a parameter nor a name, or is a later run's by now.
    """
    held = update.by_tensor
    _require_held(update)
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
        if id(tensor) in held
    }
    for one in changed([one for one in update.held if one.is_finer]):
        one.take_up()
    for one in update.held:
        if one.is_finer:
            state.setdefault(one.name, {})[MASTER] = _as_saved(one.tensor, one)
    own = {key: value for key, value in update.optimizer.state.items() if id(key) not in held}
    _require_names(update.optimizer, own)
    return {"state": state, "param_groups": groups, **({"own": own} if own else {})}


def _require_held(update: Update) -> None:
    """Refuses an optimizer that was given ready-made, and that another run has given other tensors to hold since."""
    held = update.by_tensor
    if any(id(tensor) not in held for group in update.optimizer.param_groups for tensor in group["params"]):
        raise CheckpointError(
            f"The {type(update.optimizer).__name__} that was given ready-made is used by a later Trainer, or holds "
            "other parameters by now, so this engine has no state of it. Ask the later Trainer's engine; "
            "engine.model_state() has the model alone."
        )


def _require_names(optimizer: torch.optim.Optimizer, own: dict[Any, Any]) -> None:
    unknown = [key for key in own if not isinstance(key, str)]
    if unknown:
        raise CheckpointError(
            f"{type(optimizer).__name__} keeps state for {len(unknown)} keys that are neither parameters of the model "
            f"nor names, the first of them a {type(unknown[0]).__name__}. Keep it under a parameter or a string."
        )


def _as_saved(value: Any, held: Held) -> Any:
    if not isinstance(value, torch.Tensor) or is_spread(value) or not is_spread(held.parameter):
        return value
    return as_part(value, held.parameter) if value.dim() and value.shape == held.tensor.shape else value


def load_optimizer_state(update: Update, saved: dict[str, Any]) -> None:
    """Takes up a state that was saved by name, under whatever plan.

    Raises:
        CheckpointError: The optimizer's groups hold other parameters than those that were saved.
    """
    _require_held(update)
    optimizer, held = update.optimizer, update.by_tensor
    mine = [[held[id(p)].name for p in group["params"]] for group in optimizer.param_groups]
    groups = _groups_for(mine, saved["param_groups"])
    places = {name: place for place, name in enumerate(name for group in mine for name in group)}
    by_name = {one.name: one for one in update.held}
    own = map_values(saved.get("own", {}), lambda value: _as_held(value, None))
    numbered = {
        "state": {
            **copy.deepcopy(own),
            **{
                places[name]: {key: _as_held(value, by_name[name]) for key, value in values.items() if key != MASTER}
                for name, values in saved["state"].items()
                if values.keys() != {MASTER}
            },
        },
        "param_groups": [
            {**here, **group, **_implementation(here), "params": [places[name] for name in names]}
            for group, here, names in zip(groups, optimizer.param_groups, mine, strict=True)
        ],
    }
    optimizer.load_state_dict(numbered)
    for one in update.held:
        if one.is_copy:
            _load_copy(one, saved["state"].get(one.name, {}).get(MASTER))


def _groups_for(mine: Sequence[Sequence[str]], saved: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns for each of an optimizer's groups what was saved of it: the one with the same parameters.

    The order within a group is the optimizer's own. Of a group without a parameter, as a stage of a model may have one,
    it is what is in its place.
    """
    by_names = {frozenset(group["params"]): group for group in saved if group["params"]}
    wanted = {frozenset(names) for names in mine if names}
    if wanted != by_names.keys():
        raise CheckpointError(
            f"The checkpoint's optimizer has groups of {[len(group['params']) for group in saved]} parameters, and "
            f"this one of {[len(names) for names in mine]}, or of other parameters. Configure the optimizer as it was "
            "saved."
        )
    in_place = dict(enumerate(saved))
    return [by_names.get(frozenset(names), in_place.get(place, {})) for place, names in enumerate(mine)]


def _load_copy(held: Held, master: Any) -> None:
    """Gives a copy the weights that the model has loaded, with the digits that were saved of them beside it."""
    with torch.no_grad():
        held.tensor.copy_(local(held.parameter))
        if held.is_finer and master is not None:
            held.tensor.copy_(_as_held(master, held))
    held.agree()


def _as_held(value: Any, held: Held | None) -> Any:
    """What the optimizer keeps of a value: of one that is as large as the parameter, what belongs to what it holds."""
    if isinstance(value, (bool, int, float, str)) or value is None or not hasattr(value, "shape"):
        return value
    if held is None or len(value.shape) == 0 or tuple(value.shape) != tuple(held.parameter.shape):
        return part_for(value, torch.empty(0))
    if not held.is_copy:
        part = part_for(value, held.parameter)
        return part if is_spread(held.tensor) else alone(local(part))
    if is_spread(value) and is_spread(held.parameter) and _laid_out_alike(value, held.parameter):
        return local(value)
    return alone(cut(whole(value), held.parameter))  # cut where it is: never on the device


def _laid_out_alike(value: Any, parameter: Any) -> bool:
    same: bool = value.placements == parameter.placements and value.device_mesh == parameter.device_mesh
    return same


def _implementation(group: dict[str, Any]) -> dict[str, Any]:
    """Which kernels run is this plan's choice, not the saved one's."""
    return {key: group[key] for key in ("foreach", "fused", "capturable") if key in group}
