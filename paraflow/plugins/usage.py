"""Which units run and which parameters have a part in the loss, on which ranks: gathers and sums are over all."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from torch import nn

from paraflow.data.batch import children
from paraflow.errors import ModelError
from paraflow.plugins.sharding import Sharding, groups_of
from paraflow.plugins.stale import name_of
from paraflow.plugins.units import runs

if TYPE_CHECKING:
    from paraflow.mesh import Mesh


class Usage:
    """Has all ranks gather the same units and reduce the gradients of the same parameters, in the same order.

    A unit is gathered in one message where its forward begins, and its gradients are summed in one message. Where a
    rank leaves out what another uses, the messages do not match: torch waits for ever, or adds up what does not belong
    together. So the ranks compare what ran and what the loss depends on before they run backward: in the first step,
    and where parameters may differ in each. Then a rank gives zeros for what only others use, and runs backward through
    its unit all the same. In later steps the ranks compare one number before the optimizer steps.

    Args:
        sharding: The sharded model.
        mesh: The ranks.
        mixed: Whether ranks may use other parameters.
    """

    def __init__(self, sharding: Sharding, mesh: Mesh, *, mixed: bool) -> None:
        self._sharding, self._mesh, self._mixed = sharding, mesh, mixed
        self._compares = mesh.data_ranks > 1
        self._looks_ahead = True
        self._trained = [held for held in sharding.sharded() if held.sharded_param.requires_grad]
        groups = [group for unit in sharding.units() for group in groups_of(unit._get_fsdp_state())]
        self._places = {id(group): place for place, group in enumerate(groups)}
        self._modules = {id(group): group.modules[0] for group in groups}
        self._outputs: dict[int, torch.Tensor] = {}
        self.begin()

    def begin(self) -> None:
        """Begins a step."""
        self._seen = 0  # a checksum
        self._runs = [0] * len(self._places)

    def after_forward(self, begins: Sequence[torch.Tensor]) -> None:
        """Notes what a forward ran whose backward comes later.

        Args:
            begins: What backward begins with: the loss, or what goes on to other ranks.

        Raises:
            ModelError: In the first step, that ranks ran other units, or use other parameters.
        """
        if not self._compares:
            return
        self._note_runs()
        if self._looks_ahead:
            here = set().union(*map(_leaves, begins))
            self._require_alike([id(getattr(held, "_unsharded_param", None)) in here for held in self._trained])

    def after_backward(self) -> None:
        """Notes which gradients a backward reduced."""
        if self._compares and not self._mixed:
            self._see(array("l", map(_times_reduced, self._trained)))

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Stands around forward and backward of a micro-batch."""
        hooks = [self._record(unit) for unit in self._sharding.units()] if self._compares and self._mixed else []
        try:
            yield
        finally:
            self._outputs.clear()
            for hook in hooks:
                hook.remove()
        self.after_backward()

    def _record(self, unit: nn.Module) -> Any:
        def keep(module: nn.Module, _: Any, output: Any) -> None:
            first = next(_graded(output), None) if torch.is_grad_enabled() else None
            if first is not None:
                self._outputs[id(module)] = first

        return unit.register_forward_hook(keep)

    def _see(self, numbers: array[int]) -> None:
        self._seen = crc32(numbers.tobytes(), self._seen)

    def before_backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns what backward starts from: the loss, tied to the units that only other ranks use.

        Raises:
            ModelError: Ranks ran other units; or they use other parameters, and that was not said to be so.
        """
        if not self._compares:
            return loss
        self._note_runs()
        if not (self._mixed or self._looks_ahead):
            return loss
        here = _leaves(loss)
        mine = [id(getattr(held, "_unsharded_param", None)) in here for held in self._trained]
        used = self._require_alike(mine)
        lacking = [held for held, has, other in zip(self._trained, mine, used, strict=True) if other and not has]
        for held in lacking:
            _give_zeros(held)
        left_out = self._without(here, {id(held) for held in lacking})
        self._outputs.clear()
        return _Tied.apply(loss, *left_out) if left_out else loss  # type: ignore[no-untyped-call]

    def _note_runs(self) -> None:
        ran = [self._places[id(group)] for group in self._sharding.ran()]
        self._see(array("l", ran))
        for place in ran:
            self._runs[place] += 1

    def _require_alike(self, mine: Sequence[int]) -> list[int]:
        """Returns which parameters are used on some rank, where that is allowed."""
        least, most = self._over_ranks([*self._runs, *mine])
        count = len(self._runs)
        partly = [place for place in range(count) if least[place] != most[place]]
        if partly:
            raise ModelError(self._ran_apart(partly, elsewhere=[not least[place] for place in partly]))
        apart = [
            held for held, low, high in zip(self._trained, least[count:], most[count:], strict=True) if low != high
        ]
        if apart and not self._mixed:
            raise ModelError(_used_apart(apart))
        return most[count:]

    def _over_ranks(self, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
        """The least and the most that any rank has of each number; on the host, where no device waits for it."""
        both = torch.tensor([[-number for number in numbers], [*numbers]], dtype=torch.int64)
        least, most = self._mesh.all_reduce(both, op="max").tolist()
        return [-number for number in least], most

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
        """Ends a step, before the optimizer's.

        Raises:
            ModelError: Ranks did not gather the same units, or reduce the same gradients, in the same order.
        """
        if not self._compares or self._mixed:
            return
        self._looks_ahead = False
        least, most = self._over_ranks([self._seen])
        if least != most:
            self._require_alike([held.sharded_param.grad is not None for held in self._trained])
            raise ModelError(
                "The ranks ran the model's units, or had gradients for its parameters, in another order. Sharded "
                "weights are gathered and reduced by all ranks together: run the same on every rank, or use dp= in "
                "place of fsdp=."
            )

    def _ran_apart(self, partly: Sequence[int], elsewhere: Sequence[bool]) -> str:
        """The sentence for units that did not run alike, with the units that would do."""
        names = {id(module): name for name, module in self._sharding.root.module.named_modules()}
        by_place = {place: names.get(id(self._modules[key]), "") for key, place in self._places.items()}
        apart = {by_place[place] for place in partly}
        kept = [name for name in by_place.values() if name and name not in apart]
        parents = [_caller(self._sharding.root.module, name) for name in sorted(apart)]
        units = [*kept, *dict.fromkeys(parent for parent in parents if parent and parent not in kept)]
        told = f"{units}" if len(units) <= _TOLD else "[...] with the others and a module that holds them"
        how = "on some ranks only" if all(elsewhere) else "more often on some ranks"
        return (
            f"These units of the sharded model ran {how}, and all ranks gather a unit together: "
            f"{', '.join(sorted(apart)[:_TOLD])}. What not every rank runs must lie inside one unit, which every rank "
            f"runs, or in none: write plugins=[pf.plugins.FSDP(units={told}, find_unused_parameters=True)]."
        )


_TOLD = 8


def _caller(model: nn.Module, name: str) -> str:
    """The name of the module around another that runs as a whole; ``""`` is the model."""
    while "." in name:
        name = name.rpartition(".")[0]
        if runs(model.get_submodule(name)):
            return name
    return ""


def _times_reduced(held: Any) -> int:
    """How often a parameter's gradient was reduced in this step, of which the counter of its shard tells."""
    gradient = held.sharded_param.grad
    return -1 if gradient is None else int(gradient._local_tensor._version)


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


def _used_apart(partly: Sequence[Any]) -> str:
    names = [name_of(held) for held in partly]
    return (
        f"These parameters have a part in the loss on some ranks only: {', '.join(names[:5])}"
        f"{' and more' if len(names) > 5 else ''}. If ranks may use different parts of the model, write "
        "plugins=[pf.plugins.FSDP(find_unused_parameters=True)]; such a part must lie inside a unit that every rank "
        "runs (units=[...])."
    )
