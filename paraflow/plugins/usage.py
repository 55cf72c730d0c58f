"""Which parameters have a part in the loss, on which ranks: sharded gradients are sums over all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paraflow.data.batch import children
from paraflow.errors import ModelError
from paraflow.plugins.sharding import Sharding, groups_of

if TYPE_CHECKING:
    from paraflow.mesh import Mesh


class Usage:
    """Has all ranks reduce the gradients of the same parameters in the same order.

    The gradients of a unit are summed over the ranks in one message, and units in the order of backward. Where a rank
    leaves out a parameter that another uses, the messages would not match: torch waits for ever, or adds up what does
    not belong together. So the ranks compare what the loss depends on before they run backward. Where they may differ,
    a rank gives zeros for what only others use, and runs backward through its unit all the same.

    Args:
        sharding: The sharded model.
        mesh: The ranks.
        mixed: Whether ranks may use other parameters. If not, they compare in the first step alone.
    """

    def __init__(self, sharding: Sharding, mesh: Mesh, *, mixed: bool) -> None:
        self._sharding, self._mesh, self._mixed = sharding, mesh, mixed
        self._compares = mesh.data_ranks > 1
        self._outputs: dict[int, torch.Tensor] = {}
        self._hooks = [self._record(unit) for unit in sharding.units()] if self._compares else []

    def _record(self, unit: nn.Module) -> Any:
        def keep(module: nn.Module, _: Any, output: Any) -> None:
            first = next(_graded(output), None) if torch.is_grad_enabled() else None
            if first is not None:
                self._outputs[id(module)] = first

        return unit.register_forward_hook(keep)

    def before_backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns what backward starts from: the loss, tied to the units that only other ranks use.

        Raises:
            ModelError: Ranks use other parameters, and that was not said to be so.
        """
        if not self._compares:
            return loss
        trained = [held for held in self._sharding.sharded() if held.sharded_param.requires_grad]
        here = _leaves(loss)
        mine = [id(getattr(held, "_unsharded_param", None)) in here for held in trained]
        counts = torch.tensor(mine, dtype=torch.float32)
        ranks = self._mesh.all_reduce(counts).tolist()
        if not self._mixed:
            partly = [held for held, count in zip(trained, ranks, strict=True) if 0 < count < self._mesh.data_ranks]
            _require_none(partly)
        lacking = [held for held, used, count in zip(trained, mine, ranks, strict=True) if count and not used]
        for held in lacking:
            _give_zeros(held)
        left_out = self._without(here, {id(held) for held in lacking})
        self._outputs.clear()
        return _Tied.apply(loss, *left_out) if left_out else loss  # type: ignore[no-untyped-call]

    def _without(self, here: set[int], lacking: set[int]) -> list[torch.Tensor]:
        """The outputs of units of which the loss uses nothing here, and something elsewhere."""
        outputs = []
        for unit in self._sharding.units():
            held = [one for group in groups_of(unit._get_fsdp_state()) for one in group.fsdp_params]
            used = any(id(getattr(one, "_unsharded_param", None)) in here for one in held)
            if not used and any(id(one) in lacking for one in held) and id(unit) in self._outputs:
                outputs.append(self._outputs[id(unit)])
        return outputs

    def end(self) -> None:
        """Ends a step: ranks that agreed once are not asked again."""
        if self._compares and not self._mixed:
            self._compares = False
            for hook in self._hooks:
                hook.remove()


class _Tied(torch.autograd.Function):
    """The loss as it is; backward runs through the other tensors too, with zeros."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.others = [(other.shape, other.dtype, other.device) for other in others]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.others)
        return (gradient, *zeros)


def _graded(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        if output.requires_grad:
            yield output
        return
    for child in children(output):
        yield from _graded(child)


def _leaves(loss: torch.Tensor) -> set[int]:
    """The ids of the tensors that backward from a loss would give a gradient."""
    found: set[int] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        waiting.extend(following for following, _ in node.next_functions)
    return found


def _give_zeros(held: Any) -> None:
    gathered = getattr(held, "_unsharded_param", None)
    if gathered is not None and gathered.grad is None and held.unsharded_accumulated_grad is None:
        gathered.grad = torch.zeros_like(gathered)


def _require_none(partly: list[Any]) -> None:
    if not partly:
        return
    names = [str(held._param_fqn).removeprefix("module.") for held in partly]
    raise ModelError(
        f"These parameters have a part in the loss on some ranks only: {', '.join(names[:5])}"
        f"{' and more' if len(names) > 5 else ''}. If ranks may use different parts of the model, write "
        "plugins=[pf.plugins.FSDP(find_unused_parameters=True)]."
    )
