"""Blocks that are treated while a model's step runs, and untouched otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from paraflow.planner.recomputation import Treatment
from paraflow.recompute.block import Recomputed
from paraflow.recompute.caches import Caches
from paraflow.recompute.compiled import compilable
from paraflow.recompute.offload import Offloaded, Waiting
from paraflow.recompute.operations import nothing_more, these, what_is_expensive

Forward = Callable[..., Any]


class TreatedBlocks:
    """Forwards in the place of blocks' own, put there on entering and taken away on leaving.

    A module is the user's: between steps it is as they made it, so that it can be copied, saved, or trained under
    another plan. Its names never change.

    Args:
        forwards: What replaces a block's forward, by block.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> with TreatedBlocks([(layer, lambda x: "instead")]):
        ...     layer(None)
        'instead'
        >>> "forward" in vars(layer)
        False
    """

    def __init__(self, forwards: list[tuple[nn.Module, Forward]] | None = None) -> None:
        self.forwards = forwards or []
        self._depth = 0
        self._own: list[Any] = []

    def treat(self, blocks: Mapping[str, nn.Module], treatments: Mapping[str, Treatment], min_bytes: int) -> None:
        """Gives each block the treatment of its name; blocks without one keep their activations.

        Args:
            blocks: The blocks, in the order they run.
            treatments: What becomes of each.
            min_bytes: The smallest tensor that is offloaded.
        """
        waiting = Waiting(min_bytes)
        made = [(block, _forward(name, block, treatments.get(name), waiting)) for name, block in blocks.items()]
        self.forwards = [(block, forward) for block, forward in made if forward is not None]

    def treat_all(self, blocks: Mapping[str, nn.Module], what: str, min_bytes: int) -> None:
        """Gives all blocks one treatment.

        Args:
            blocks: The blocks, in the order they run.
            what: ``"full"``, ``"selective"`` or ``"offload"``.
            min_bytes: The smallest tensor that is offloaded.
        """
        if what == "selective":
            self.forwards = [(block, Recomputed(name, block, what_is_expensive)) for name, block in blocks.items()]
            return
        treatment = Treatment("offload" if what == "offload" else "recompute")
        self.treat(blocks, dict.fromkeys(blocks, treatment), min_bytes)

    def treat_compiled(self, blocks: Mapping[str, nn.Module], what: str) -> None:
        """Gives all blocks one treatment in a way that torch.compile can follow.

        Args:
            blocks: The blocks.
            what: ``"full"`` or ``"selective"``.
        """
        keeps = what_is_expensive if what == "selective" else nothing_more
        self.forwards = [(block, compilable(block, keeps)) for block in blocks.values()]

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._own = [vars(block).get("forward") for block, _ in self.forwards]
        for block, forward in self.forwards:
            vars(block)["forward"] = forward

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        for (block, _), own in zip(self.forwards, self._own, strict=True):
            if own is None:
                del vars(block)["forward"]
            else:
                vars(block)["forward"] = own


class TreatedSteps(nn.Module):
    """A model's steps, run with its blocks treated.

    Args:
        steps: Called as ``steps(step_name, batch)``.
        treated: The blocks.
        caches: What switches the model's caches off.
    """

    def __init__(self, steps: nn.Module, treated: TreatedBlocks, caches: Caches) -> None:
        super().__init__()
        self.module = steps
        self._treated = treated
        self._caches = caches

    def forward(self, step: str, batch: Any) -> Any:
        """Runs a step."""
        with self._treated, self._caches:
            return self.module(step, batch)


def _forward(name: str, block: nn.Module, treatment: Treatment | None, waiting: Waiting) -> Forward | None:
    if treatment is None or treatment.kind == "keep":
        return None
    if treatment.kind == "offload":
        return Offloaded(block, waiting)
    if treatment.kind == "operations":
        return Recomputed(name, block, these(treatment.operations))
    return Recomputed(name, block)
