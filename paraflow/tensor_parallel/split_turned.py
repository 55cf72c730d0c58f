"""Split logits with their classes in dimension 1, as torch's cross-entropy takes those of sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.utils._pytree import tree_map

from paraflow.errors import ModelError
from paraflow.tensor_parallel.split_logits import OwnRows, SplitLogits
from paraflow.tensor_parallel.split_losses import cross_entropy
from paraflow.tensor_parallel.split_names import METADATA, name_of


class TurnedLogits(torch.Tensor):
    """`SplitLogits` [batch, tokens, classes], seen as [batch, classes, tokens]; joined by all but cross-entropy.

    Attributes:
        logits: As they are, with the classes last.
        own: Which rows are this rank's; see `SplitLogits`.
    """

    logits: SplitLogits
    own: OwnRows | None

    @staticmethod
    def __new__(cls, logits: SplitLogits) -> TurnedLogits:
        """See the class for what is given."""
        batch, tokens, classes = logits.shape
        made: TurnedLogits = torch.Tensor._make_wrapper_subclass(
            cls, (batch, classes, tokens), dtype=logits.dtype, device=logits.device
        )
        made.logits, made.own = logits, logits.own
        return made

    @property
    def local(self) -> torch.Tensor:
        """What this rank holds, with the classes last."""
        return self.logits.local

    def whole(self) -> torch.Tensor:
        """The logits of all classes, [batch, classes, tokens], an ordinary tensor: a collective."""
        return self.logits.whole().transpose(1, 2)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Keeps the split in cross-entropy, and joins otherwise."""
        name, first = name_of(func), args[0] if args else None
        if func is functional.cross_entropy:
            return _cross_entropy(*args, **(kwargs or {}))
        if name in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if isinstance(first, TurnedLogits):
            if name in ("requires_grad", "grad_fn", "register_hook", "__repr__", "__format__", "is_leaf"):
                return func(first.logits, *args[1:], **(kwargs or {}))
            if name in ("detach", "float", "contiguous", "to", "double", "half", "bfloat16") and not kwargs:
                return TurnedLogits(func(first.logits, *args[1:]))
        return func(*tree_map(_joined, args), **tree_map(_joined, kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own type forgets the class
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Nothing reaches torch beside its functions."""
        raise ModelError(f"{func} was given split logits where torch cannot ask them to join: give it logits.whole().")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.logits.__reduce_ex__(protocol)


def _joined(value: Any) -> Any:
    return value.whole() if isinstance(value, (SplitLogits, TurnedLogits)) else value


def _cross_entropy(input: Any, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    batch, classes, tokens = input.shape
    if not isinstance(input, TurnedLogits) or target.shape != (batch, tokens):
        return functional.cross_entropy(_joined(input), _joined(target), *args, **kwargs)
    losses = cross_entropy(input.logits.reshape(-1, classes), target.reshape(-1), *args, **kwargs)
    return losses.view(batch, tokens) if losses.dim() else losses
