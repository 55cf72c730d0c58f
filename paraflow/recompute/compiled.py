"""A block that runs again in backward under torch.compile, which reads what is kept from torch's own marks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from paraflow.recompute.operations import Keeps, is_kept_always


def compilable(block: nn.Module, keeps: Keeps) -> Callable[..., Any]:
    """Returns what replaces a block's forward where the model is compiled.

    The compiler recomputes operators of its graph, so that buffers and random numbers are right without help.

    Args:
        block: The block.
        keeps: Which operators' outputs are kept.
    """
    own = block.forward

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = is_kept_always(operator) or keeps(operator, 0)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(own, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return forward
