"""A block whose forward keeps little, and runs again in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from paraflow.errors import ModelError
from paraflow.recompute.kept import Call, Keeping, Kept, Replaying
from paraflow.recompute.operations import Keeps, is_collective, is_kept_always, nothing_more
from paraflow.recompute.surroundings import Moment, Surroundings


class Recomputed:
    """The forward of a block, of which backward has the input and computes the rest again (Chen et al. 2016).

    It gives the same gradients, bit by bit: random numbers are the same the second time, buffers are not updated
    twice, and what communicates or chooses is not run again. The first forward finds out whether there is anything of
    that kind; a block without it runs without Python between its operators from then on.

    Args:
        name: The block's name in the model.
        block: The block.
        keeps: Which operators' outputs are kept besides.
    """

    def __init__(self, name: str, block: nn.Module, keeps: Keeps = nothing_more) -> None:
        self._name = name
        self._forward: Callable[..., Any] = block.forward
        self._block = block
        self._keeps = keeps
        self._surroundings = Surroundings(block)
        self._unread: set[Call] = set()
        self._plain: dict[bool, bool] = {}
        # A sharded part gathers its parameters among the block's operators, and not again when they run again.
        self._collectives = not any(_is_sharded(part) for part in block.modules() if part is not block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the block; the arguments and results are those of its forward."""
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        at = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[place] for place in at]
        for place in at:
            leaves[place] = None  # torch keeps them, as it keeps what is saved for backward

        def run(*given: torch.Tensor) -> Any:
            filled = list(leaves)
            for place, tensor in zip(at, given, strict=True):
                filled[place] = tensor
            args, kwargs = tree_unflatten(filled, spec)
            return self._forward(*args, **kwargs)

        versions = [tensor._version for tensor in tensors]
        visit = _Visit(self, self._surroundings.now())
        out = checkpoint(run, *tensors, use_reentrant=False, context_fn=visit.contexts)
        if any(tensor._version != version for tensor, version in zip(tensors, versions, strict=True)):
            raise ModelError(
                f"The block {self._name!r} changes its input in place, so it cannot run again in backward. Write the "
                "first operation that is in place (such as ReLU(inplace=True)) without it, or leave this block out: "
                "activation_checkpointing takes a list of patterns of module names."
            )
        return out

    def keeping(self, kept: Kept) -> AbstractContextManager[Any]:
        """Returns what forward runs in."""
        if self._plain.get(self._block.training, False):
            return nullcontext()
        return Keeping(kept, self._keeps, self._unread, self._collectives)

    def learn(self, kept: Kept, moment: Moment, versions: list[tuple[int, int]]) -> None:
        """Notes after a forward what it needed."""
        self._surroundings.learn(moment, versions)
        if self._keeps is nothing_more:
            self._plain.setdefault(self._block.training, not kept.outputs)

    def unlearn(self, kept: Kept) -> None:
        """Notes after running again which outputs nothing asked for: what follows the last that backward needs."""
        unread = kept.outputs.keys() - kept.read
        self._unread |= {call for call in unread if not (is_kept_always(call[0]) or is_collective(call[0]))}


@dataclass
class _Visit:
    """One call of a block: what it keeps, and what was around it."""

    owner: Recomputed
    moment: Moment
    kept: Kept = field(default_factory=Kept)

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The contexts of forward, and of running again."""
        return self._first(), _Again(self)

    @contextmanager
    def _first(self) -> Iterator[None]:
        versions = self.owner._surroundings.versions()
        with self.owner.keeping(self.kept):
            yield
        self.owner.learn(self.kept, self.moment, versions)


class _Again:
    """What a block runs in again; entered once for each backward."""

    def __init__(self, visit: _Visit) -> None:
        self._visit = visit
        self._open: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        visit = self._visit
        around = _both(visit)
        around.__enter__()
        self._open.append(around)

    def __exit__(self, *error: Any) -> bool | None:
        return self._open.pop().__exit__(*error)


@contextmanager
def _both(visit: _Visit) -> Iterator[None]:
    kept = visit.kept
    with visit.owner._surroundings.as_at(visit.moment):
        if not kept.outputs:
            yield
            return
        try:
            with Replaying(kept):
                yield
        finally:
            visit.owner.unlearn(kept)


def _is_sharded(module: nn.Module) -> bool:
    return hasattr(module, "_get_fsdp_state")
