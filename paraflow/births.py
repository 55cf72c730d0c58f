"""Where the values of a model come from that was built without memory, on torch's meta device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING
from zlib import crc32

import torch
from torch import nn

from paraflow import seeding
from paraflow.errors import CheckpointError, ModelError, some_of
from paraflow.parts import Box, Sliceable, cut, is_spread, local
from paraflow.recording import View, cell_of, evaluate, random_states, view_of

if TYPE_CHECKING:
    from paraflow.mesh import Mesh

_ATTRIBUTE = "_paraflow_birth"


class Birth(ABC):
    """The first value of a parameter or buffer."""

    @abstractmethod
    def part(self, box: Box) -> torch.Tensor:
        """Returns a box of the value, on the host; it may be a view of the whole, or of a file: copy it.

        Raises:
            ModelError: The value is not known after all.
        """

    def parts(self, boxes: Sequence[Box]) -> list[torch.Tensor]:
        """Returns some boxes of the value, as `part` returns one."""
        return [self.part(box) for box in boxes]


class Recorded(Birth):
    """What was done to the tensor under `pf.deferred_init`, done now.

    Args:
        view: Where the tensor lies in what was written down.
        tensor: The tensor.
    """

    def __init__(self, view: View, tensor: torch.Tensor) -> None:
        self._view = view
        self._version = tensor._version

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether nothing was done to the tensor since."""
        return tensor._version == self._version

    def part(self, box: Box) -> torch.Tensor:
        """Runs what was written down, for the whole, and returns a box of it."""
        return self.parts([box])[0]

    def parts(self, boxes: Sequence[Box]) -> list[torch.Tensor]:
        """Runs it once."""
        value: torch.Tensor = evaluate(self._view)
        return [value[box] for box in boxes]

    def drawn_from(self) -> Iterator[torch.Tensor]:
        """Yields the states of the generators it draws from, in order."""
        return random_states(self._view)


class Stored(Birth):
    """A value on disk, of which only the box is read."""

    def __init__(self, weight: Sliceable) -> None:
        self._weight = weight

    def part(self, box: Box) -> torch.Tensor:
        """Reads a box."""
        return self._weight[box]


def remember(tensor: torch.Tensor, birth: Birth) -> None:
    """Ties to a tensor that has no values where they come from."""
    setattr(tensor, _ATTRIBUTE, birth)


def forget(tensor: torch.Tensor) -> None:
    """Undoes `remember`: the tensor has its value."""
    tensor.__dict__.pop(_ATTRIBUTE, None)


def births_of(module: nn.Module) -> Mapping[str, Birth]:
    """Returns where the values come from of the parameters and buffers that have none yet, by name.

    They are on the meta device. In this order: weights that were given to the module (`give_weights`); what
    `pf.deferred_init` wrote down; the `reset_parameters` of the layer, called layer by layer in the order of
    registration, after the seed that `pf.seed` was given last (0 if it never was).

    Raises:
        ModelError: There is a tensor for which none of them is there, or that was changed where it could not be
            written down.
    """
    tensors = {name: tensor for name, tensor in tensors_of(module) if tensor.is_meta and not is_spread(tensor)}
    births = {name: birth for name, tensor in tensors.items() if (birth := _birth_of(name, tensor)) is not None}
    unknown = tensors.keys() - births.keys()
    if unknown:
        from paraflow.resets import resets_of

        births.update(resets_of(module, unknown))
    return births


def require_same_births(module: nn.Module, mesh: Mesh, dims: Sequence[str] | None = None) -> None:
    """Makes sure that all ranks will draw the same values: each of them keeps a part of its own draw.

    Args:
        module: The module; what has memory already is left out.
        mesh: The ranks: a collective, where the module has a tensor without memory.
        dims: The mesh dimensions along which ranks are compared; those of the data ranks if None.

    Raises:
        ModelError: They were seeded differently.
    """
    waiting = [(name, tensor) for name, tensor in tensors_of(module) if tensor.is_meta and not is_spread(tensor)]
    if not waiting:
        return
    drawn = 0
    for name, tensor in waiting:
        birth = _birth_of(name, tensor)
        if birth is None:
            drawn = crc32(str(seeding.chosen()).encode(), drawn)
        elif isinstance(birth, Recorded):
            for state in birth.drawn_from():
                drawn = crc32(state.numpy().tobytes(), drawn)
    same = mesh.agrees(drawn) if dims is None else len(set(mesh.gather_texts(str(drawn), dims))) == 1
    if not same:
        raise ModelError(
            f"{waiting[0][0]} has no value yet, and the ranks were seeded differently before {type(module).__name__} "
            "was built: each would keep a part of another model. Call pf.seed(0) before building it, alike on every "
            "rank."
        )


def tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the parameters and buffers by name, layer by layer; one that is tied comes once, under its first name."""
    seen: set[int] = set()
    for prefix, layer in module.named_modules():
        for key, tensor in chain(layer._parameters.items(), layer._buffers.items()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield (f"{prefix}.{key}" if prefix else key), tensor


def recorded(tensor: torch.Tensor) -> Birth | None:
    """Returns the birth of a tensor that was made under `pf.deferred_init`, or None."""
    return None if cell_of(tensor) is None else Recorded(view_of(tensor), tensor)


def _birth_of(name: str, tensor: torch.Tensor) -> Birth | None:
    birth: Birth | None = getattr(tensor, _ATTRIBUTE, None) or recorded(tensor)
    if isinstance(birth, Recorded) and not birth.is_of(tensor):
        raise ModelError(
            f"{name} was changed outside pf.deferred_init(), where it has no memory and nothing is written down. Put "
            "the change inside the block, or load the weights with pf.checkpoint.load_model."
        )
    return birth


def give_weights(module: nn.Module, weights: Mapping[str, Sliceable]) -> None:
    """Gives a module its weights: those that have memory now, the others when the Trainer lays the model out.

    Of a tensor that is spread over ranks only this rank's part is read. Tied weights need to be there under one of
    their names. Values are converted to the module's dtypes.

    Args:
        module: The module.
        weights: Whole tensors, in memory or on disk, by the names of the module's `state_dict`.

    Raises:
        CheckpointError: A weight is missing, unknown or of another shape.
    """
    state = {name: t for name, t in module.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    found = {same[0]: next((name for name in same if name in weights), None) for same in names.values()}
    _require_same(
        missing=[name for name, source in found.items() if source is None],
        unknown=[name for name in weights if name not in state],
        differing=[
            f"{name} {tuple(weights[name].shape)} for {tuple(tensor.shape)}"
            for name, tensor in state.items()
            if name in weights and tuple(weights[name].shape) != tuple(tensor.shape)
        ],
    )
    with torch.no_grad():
        for name, source in found.items():
            assert source is not None
            if state[name].is_meta and not is_spread(state[name]):
                remember(state[name], Stored(weights[source]))
            else:
                local(state[name]).copy_(cut(weights[source], state[name]))


def _require_same(**problems: list[str]) -> None:
    lines = {
        "missing": "they lack {}",
        "unknown": "they have {}, which it has not",
        "differing": "of another shape: {}",
    }
    found = [lines[kind].format(some_of(names)) for kind, names in problems.items() if names]
    if found:
        raise CheckpointError(f"The weights are of another model: {'; '.join(found)}.")
