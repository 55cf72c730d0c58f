"""Takes out of a model what other stages hold, before it has values; modules and names stay where they are."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import NoReturn

import torch
from torch import nn

from paraflow.errors import ModelError
from paraflow.pipelining.cut import Cut


def hollow(model: nn.Module, cut: Cut, own: Collection[int], kept: Collection[str]) -> None:
    """Takes the parameters and buffers of other stages' units out of a model.

    Args:
        model: The model; it may be without memory, and what is taken out never has any.
        cut: The stages.
        own: The stages of this rank.
        kept: The names of parameters that stay though units of other stages have them.

    Example:
        >>> from paraflow.pipelining.cut import cut
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> hollow(net, cut(net, 2), own=[1], kept=[])
        >>> [name for name, _ in net.named_parameters()]
        ['2.weight', '2.bias']
    """
    names = set(kept)
    stays = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in names}
    mine = [unit.module for place in own for unit in cut.stages[place]]
    stays |= {id(tensor) for module in mine for tensor in (*module.parameters(), *module.buffers())}
    for place, stage in enumerate(cut.stages):
        if place not in own:
            for unit in stage:
                _empty(unit.module, stays)
                # Looked at before forward; a replay puts its own before it, and does not call this.
                unit.module.__dict__["_compiled_call_impl"] = partial(_refuse, unit.name, place)


def _empty(module: nn.Module, stays: Collection[int]) -> None:
    for part in module.modules():
        held: dict[str, torch.Tensor | None] = {**part._parameters, **part._buffers}
        for key, tensor in held.items():
            if tensor is not None and id(tensor) not in stays:
                setattr(part, key, None)  # not by the dict: recurrent layers keep a list of their weights besides


def _refuse(name: str, stage: int, *args: object, **kwargs: object) -> NoReturn:
    raise ModelError(
        f"{name or 'The model'} was called outside of a step, and its weights are on stage {stage} of a pipeline, on "
        "another rank. Run the model by trainer.predict or trainer.evaluate, on every rank; or save it, and load it "
        "in one process."
    )
