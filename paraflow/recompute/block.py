"""A block whose forward keeps little, and runs again in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointError, checkpoint

from paraflow.errors import ModelError, ParaflowError
from paraflow.recompute.kept import Call, Keeping, Kept, Replaying
from paraflow.recompute.mentions import mentions_what_is_not_run_twice
from paraflow.recompute.operations import Keeps, is_collective, is_kept_always, nothing_more
from paraflow.recompute.surroundings import Moment, Surroundings

_OF_THE_BLOCK = (CheckpointError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
_ADVICE = (
    "A block has to do the same with the same input. Where it adds to a cache that is an argument, switch the cache "
    "off in training (model.config.use_cache = False in transformers); otherwise leave this block out: "
    "activation_checkpointing takes a list of patterns of module names."
)


class Recomputed:
    """The forward of a block, of which backward has the input and computes the rest again (Chen et al. 2016).

    It gives the same gradients, bit by bit: random numbers are the same the second time, buffers are not updated
    twice, and what communicates or chooses is not run again. The block's code and its first forward tell whether there
    is anything of that kind; without it there is no Python between a forward's operators. All that runs again is
    watched, so that what begins later and was not kept is refused.

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
        self._surroundings = Surroundings(name, block)
        self._unread: set[Call] = set()
        self._watched = keeps is not nothing_more or mentions_what_is_not_run_twice(block)
        self._plain: set[bool] = set()  # the modes whose first forward had nothing to keep

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
        if not self._watched and self._block.training in self._plain:
            return nullcontext()
        return Keeping(kept, self._keeps, self._unread)

    def learn(self, kept: Kept, moment: Moment) -> None:
        """Notes after a forward what it needed."""
        self._surroundings.learn(moment)
        self._watched = self._watched or bool(kept.outputs)
        self._plain.add(self._block.training)

    @contextmanager
    def again(self, kept: Kept, moment: Moment) -> Iterator[None]:
        """What running again is done in."""
        with self._surroundings.as_at(moment):
            try:
                with Replaying(self._name, kept):
                    yield
            finally:
                self._unlearn(kept)

    def unpacked(self, unpack: Callable[[Any], Any], saved: Any) -> Any:
        """Returns a tensor that backward needs, for which the block may run again first."""
        try:
            return unpack(saved)
        except ParaflowError:
            raise
        except _OF_THE_BLOCK as error:
            what = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
            raise ModelError(
                f"The block {self._name!r} did something else when it ran again in backward than before: {what}. "
                f"{_ADVICE}"
            ) from error
        except RuntimeError as error:  # torch's own may as well be of memory, or of another rank
            error.add_note(f"This came up while the block {self._name!r} ran again in backward. {_ADVICE}")
            raise

    def _unlearn(self, kept: Kept) -> None:
        """Notes after running again which outputs nothing asked for: what follows the last that backward needs."""
        self._watched = self._watched or kept.missed
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
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, partial(self.owner.unpacked, unpack)),
            self.owner.keeping(self.kept),
        ):
            yield
        self.owner.learn(self.kept, self.moment)


class _Again:
    """What a block runs in again; entered once for each backward."""

    def __init__(self, visit: _Visit) -> None:
        self._visit = visit
        self._open: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        around = self._visit.owner.again(self._visit.kept, self._visit.moment)
        around.__enter__()
        self._open.append(around)

    def __exit__(self, *error: Any) -> bool | None:
        return self._open.pop().__exit__(*error)
