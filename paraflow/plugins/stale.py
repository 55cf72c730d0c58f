"""What a model does with weights that sharding would silently lose: keep old ones, or change gathered ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ref

from torch import nn

from paraflow.errors import ModelError, some_of


class Originals:
    """The parameters that a model had before it was sharded, as long as somebody else keeps them.

    They take part in nothing any more, so one of them that gets a gradient was used in the place of the one that is
    trained. Only weak references are held: what nobody keeps has no memory.

    Args:
        model: The user's module, before it is sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept = [(name, ref(parameter)) for name, parameter in model.named_parameters()]
        for parameter in model.parameters():
            parameter.grad = None  # of an earlier training: a new one must be told from it

    def require_unused(self) -> None:
        """Raises where a backward has given one of them a gradient.

        Raises:
            ModelError: The model's own code keeps them.
        """
        if not self._kept:
            return
        self._kept = [(name, kept) for name, kept in self._kept if kept() is not None]
        used = [name for name, kept in self._kept if getattr(kept(), "grad", None) is not None]
        for _, kept in self._kept:
            parameter = kept()
            if parameter is not None:
                parameter.grad = None
        if used:
            raise ModelError(
                f"The loss was computed from {some_of(used)} as kept elsewhere than in the module's own attribute, in "
                "a list for instance. Sharding has replaced the parameter, and what is kept is the old one, which is "
                "not trained. Look the weight up where it is used (self.layer.weight), or use dp= in place of fsdp=."
            )


class Changes:
    """Sees weights that were changed in place while they were gathered: the change would be thrown away.

    Gathering leaves a tensor's version counter as it is, so that it counts what the model's code has done. Changes
    through ``.data`` are not counted.

    Args:
        sharded: What torch keeps of each parameter.
    """

    def __init__(self, sharded: Iterable[Any]) -> None:
        self._sharded = list(sharded)
        self._versions: dict[int, int] = {}

    def require_none(self) -> None:
        """Raises where there was one since the last call.

        Raises:
            ModelError: A gathered weight was changed in place.
        """
        changed = list(self._changed())
        if changed:
            raise ModelError(
                f"{some_of(changed)} changed in place within a step, where a rank holds a gathered copy that is thrown "
                "away. Change weights between steps, on the shards that the model holds then: in a callback's "
                "on_step_end, for instance. Or use dp= in place of fsdp=."
            )

    def _changed(self) -> Iterator[str]:
        for held in self._sharded:
            gathered = getattr(held, "_unsharded_param", None)
            if gathered is not None and gathered._version != self._versions.get(id(held), 0):
                self._versions[id(held)] = gathered._version
                yield name_of(held)


def name_of(held: Any) -> str:
    """Returns the name of a parameter in the user's model."""
    return str(held._param_fqn).removeprefix("module.")
