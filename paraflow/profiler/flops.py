"""Counts the floating-point operations of forward and backward while they run."""

from __future__ import annotations

import math
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from paraflow.mesh import Mesh


class FlopCounter:
    """Counts the operations of the block it is around; a multiplication and an addition are two.

    Matrix products, convolutions and attention are counted, by the formulas of ``torch.utils.flop_counter`` (a causal
    mask halves nothing); what goes element by element is not. A kernel that torch has no formula for counts as nothing.
    What is computed does not change, but compiled parts run uncompiled inside, as they could not be looked into.

    Attributes:
        model: The operations of the model's forward and backward on this rank. Of an operation on distributed tensors,
            this rank's part.
        recomputed: What was computed a second time, in backward, by activation checkpointing; not in `model`.
        in_backward: To be set between forward and backward; without it, what is recomputed cannot be told apart.

    Example:
        >>> layer = torch.nn.Linear(10, 20)
        >>> with FlopCounter() as counter:
        ...     loss = layer(torch.ones(7, 10)).sum()
        ...     counter.in_backward = True
        ...     loss.backward()
        >>> counter.model == 7 * 2 * 10 * 20 * 2  # forward, and the gradient of the weight: none of the input
        True
    """

    def __init__(self) -> None:
        self.model = 0.0
        self.recomputed = 0.0
        self.in_backward = False
        self._stack = ExitStack()

    def __enter__(self) -> FlopCounter:
        if "torch._dynamo" in sys.modules:
            # A compiled function that is first called under a mode would never be compiled afterwards.
            self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        self._stack.enter_context(_Counting(self))
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends counting; the same as leaving the block."""
        self._stack.close()

    def add(self, operations: float) -> None:
        """Adds operations to those of the phase they belong to."""
        # Backward runs without gradients; where they are on in it, forward is being run again.
        if self.in_backward and torch.is_grad_enabled():
            self.recomputed += operations
        else:
            self.model += operations


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, counter: FlopCounter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter
        self._formulas = formulas()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        formula = self._formulas.get(getattr(func, "_overloadpacket", func))
        if formula is not None:
            self._counter.add(formula(*args, **kwargs, out_val=output) / _spread_over(args))
        return output


def per_sample(mesh: Mesh, operations: float, samples: int) -> float:
    """Returns the operations for one sample over all ranks that work on it: a collective.

    Args:
        mesh: The ranks.
        operations: What this rank counted.
        samples: The samples this rank counted it for.
    """
    mine = torch.tensor([operations, samples], dtype=torch.float64)
    total, over = torch.stack(mesh.all_gather(mine)).sum(0).tolist()
    # Ranks that share samples have a part of the model each, and counted the same samples.
    return float(total / max(over, 1) * mesh.world_size / mesh.data_ranks)


def formulas() -> dict[Any, Any]:
    """Returns what gives the floating-point operations of an operator's call, by operator."""
    from torch.utils import flop_counter

    aten = torch.ops.aten
    return {
        **flop_counter.flop_registry,
        aten._scaled_dot_product_flash_attention_for_cpu: flop_counter.sdpa_flop,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_counter.sdpa_backward_flop,
    }


def _spread_over(args: Any) -> int:
    """Over how many ranks an operation is spread: its tensors have the shape of the whole."""
    meshes = [arg.device_mesh for arg in args if isinstance(arg, torch.Tensor) and hasattr(arg, "device_mesh")]
    return math.prod(meshes[0].shape) if meshes else 1
