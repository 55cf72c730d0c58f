"""Compares split modules with whole ones, once: shapes and names do not say what a forward does with features.

What was derived, or taken from a model's own plan, is compared the first time that its module is called in training.
The module is run once more split and once whole, on the very arguments of that call, in evaluation mode and without a
trace; what they give is compared, and the gradients of it. (Outputs alone may agree where gradients do not: a rank may
compute all heads, and have gradients of some.) The whole one's parameters are joined for it, one module at a time. So
the first step of a training takes longer, and needs the memory of one whole module; later steps pay nothing.

Where modules inside are sharded units of their own (FSDP), outputs alone are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paraflow.data.order import preserved_random_state
from paraflow.errors import ModelError
from paraflow.parts import whole
from paraflow.tensor_parallel.distances import distance_in_all, distance_in_each, floor_of, rounding_of
from paraflow.tensor_parallel.likeness import Likeness, copies, evaluated
from paraflow.tensor_parallel.region import Region

Change = Callable[[nn.Module, Any, Any, Callable[[torch.Tensor], torch.Tensor]], tuple[Any, Any]]


@dataclass(frozen=True)
class Group:
    """Layers that are split together.

    Attributes:
        owner: The name of the module whose forward calls them.
        layers: Their names.
        heads: Where they are an attention, how many heads the ranks have between them; 0 otherwise.
        proven: Whether the owner is known to treat what is between the layers feature by feature.
    """

    owner: str
    layers: tuple[str, ...]
    heads: int = 0
    proven: bool = False


def owner_of(module: nn.Module, layers: Sequence[str]) -> str:
    """Returns the name of the innermost module that holds some layers and is called itself.

    Example:
        >>> net = nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
        >>> owner_of(net, ["0.0", "0.1"])
        ''
    """
    paths = [name.split(".")[:-1] for name in layers]
    shared = [step[0] for step in zip(*paths, strict=False)]
    length = next((n for n, step in enumerate(zip(*paths, strict=False)) if len(set(step)) > 1), len(shared))
    while length and type(module.get_submodule(".".join(shared[:length]))) in (nn.ModuleList, nn.ModuleDict):
        length -= 1
    return ".".join(shared[:length])


class Check:
    """Compares one module the first time that it is called in training.

    Make it before the split, and `watch` after it.

    Args:
        module: The model.
        group: The layers, of which the owner is compared.
        region: The ranks.
        blocks: Whether the module is a block that is given shares of the sequence.
        change: Puts other hidden states into a block's arguments.
    """

    def __init__(
        self, module: nn.Module, group: Group, region: Region, blocks: bool = False, change: Change | None = None
    ) -> None:
        self._module = module
        self._group = group
        self._region = region
        self._blocks = blocks
        self._change = change
        prefix = f"{group.owner}." if group.owner else ""
        self._before = Likeness(module.get_submodule(group.owner), [name.removeprefix(prefix) for name in group.layers])
        self._handles: list[Any] = []
        self._partial: Collection[str] = ()

    def watch(self, partial: Collection[str]) -> None:
        """Waits for the first call, behind the hooks that are there.

        Args:
            partial: The names of whole parameters whose gradients are sums over the ranks.
        """
        self._partial = partial
        self._before.changed()
        owner = self._before.owner
        self._handles.append(owner.register_forward_pre_hook(self._called, with_kwargs=True))
        for name in self._group.layers:
            layer = self._module.get_submodule(name)
            self._handles.append(layer.register_forward_pre_hook(self._called_without))

    def _called_without(self, layer: nn.Module, args: Any) -> None:
        if _is_first(layer):
            raise ModelError(
                f"{self._named} is split over tp={self._region.degree} ranks because of its layers' names and shapes, "
                "and they are called from somewhere else than its forward, so that it cannot be seen whether this is "
                f"right. {self._remedy} If it is right, say it yourself: plan={{{self._group.layers[0]!r}: 'colwise', "
                "..., 'rowwise' of the last}."
            )

    def _called(self, owner: nn.Module, args: Any, kwargs: Any) -> None:
        if not _is_first(owner):
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._group.proven:
            return
        if _in_glue():
            raise ModelError(
                f"{self._named} is split over tp={self._region.degree} ranks because of its layers' names and shapes, "
                f"and a pipeline cuts it, so that it cannot be seen whether this is right. {self._remedy}"
            )
        apart, most = self._compared(args, kwargs)
        if not apart <= most:
            raise self._refusal(apart, most)

    def _compared(self, args: Any, kwargs: Any) -> tuple[float, float]:
        """How far the outputs, and the gradients of a sum of them, are apart; and how far rounding takes them.

        What one rank finds decides nothing before all know of it, since collectives follow.
        """
        owner = self._before.owner
        with _aside(owner), evaluated(owner):
            given = self._change(owner, args, kwargs, self._joined) if self._change else (args, kwargs)
            made = self._before.made()
            with torch.set_grad_enabled(not _has_units(owner)):
                (split_args, split_kwargs), split_leaves = copies((args, kwargs))
                split = self._before.run_split(*split_args, **split_kwargs)
                (whole_args, whole_kwargs), whole_leaves = copies(given)
                reference = made.forward(*whole_args, **whole_kwargs)  # the live one's hooks are not run either
            apart, most = self._apart(split, reference, given)
            if apart > most or _has_units(owner):
                return apart, most
            mine = self._gradients(owner, split_leaves, split, reference, split=True)
            theirs = self._gradients(made, whole_leaves, reference, reference, split=False)
            pairs = zip(mine[0], theirs[0], strict=True)
            inputs = [a if a.shape == b.shape else self._joined(a) for a, b in pairs]
            apart = max(apart, distance_in_all(inputs, theirs[0]), distance_in_each(mine[1], theirs[1], floor_of(most)))
            return _largest(apart, owner, self._region), most

    def _gradients(
        self, module: nn.Module, leaves: Sequence[torch.Tensor], output: Any, like: Any, split: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Those of the arguments, and of the parameters, whole."""
        shares = split and self._blocks
        held = {name: p for name, p in module.named_parameters() if p.requires_grad}
        total = torch.zeros((), device=_device_of(module))
        for at, (tensor, other) in enumerate(zip(_tensors(output), _tensors(like), strict=True)):
            if not tensor.requires_grad or (tensor.shape != other.shape and (at or not shares)):
                continue
            probe = torch.arange(other.numel(), device=tensor.device).cos().view(other.shape)
            probe = self._region.scatter(probe, 1) if shares and not at else probe
            with torch.enable_grad():
                total = total + (tensor * probe).sum()
        wanted = [*leaves, *held.values()]
        if not total.requires_grad or not wanted:
            return [], []
        found = torch.autograd.grad(total, wanted, allow_unused=True)
        given = [torch.zeros_like(p) if g is None else g for p, g in zip(wanted, found, strict=True)]
        inputs, parameters = given[: len(leaves)], given[len(leaves) :]
        # Modules that the whole one has in common with the split one compute alike, but for blocks, on whole sequences.
        live = {id(p) for p in self._before.owner.parameters()} if split or not self._blocks else set()
        parameters = [
            self._summed(name, g) if id(p) in live else g for (name, p), g in zip(held.items(), parameters, strict=True)
        ]
        return inputs, parameters

    def _summed(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        joined = whole(gradient)
        if f"{self._group.owner}.{name}".removeprefix(".") in self._partial:
            joined = joined.contiguous()
            dist.all_reduce(joined, group=self._region.group)
        return joined

    def _joined(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._region.collect(hidden.detach(), 1).requires_grad_(hidden.requires_grad)

    def _apart(self, split: Any, whole: Any, given: Any) -> tuple[float, float]:
        """How far outputs are apart on any rank, and how far rounding takes them."""
        owner, region = self._before.owner, self._region
        mine, theirs, inputs = _tensors(split), _tensors(whole), _tensors(given)
        if _largest(float(self._have_other_forms(mine, theirs)), owner, region):
            return float("inf"), 0.0
        if self._blocks and mine:
            mine[0] = self._joined(mine[0])
        most = max([rounding_of(tensor.dtype) for tensor in theirs if tensor.is_floating_point()], default=0.0)
        apart = max(
            (self._distance(a, b, floor_of(most), inputs) for a, b in zip(mine, theirs, strict=True)), default=0.0
        )
        return _largest(apart, owner, region), _largest(most, owner, region)

    def _have_other_forms(self, mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
        """Whether outputs are others than could be compared: in number, dimensions, or what has a gradient."""
        if len(mine) != len(theirs):
            return True
        pairs = list(zip(mine, theirs, strict=True))
        if self._blocks and any(
            a.select(1, 0).shape != b.select(1, 0).shape for a, b in pairs[:1] if a.dim() > 1 < b.dim()
        ):
            return True  # the tokens of such shares could not be joined
        return any(a.dim() != b.dim() or a.requires_grad != b.requires_grad for a, b in pairs)

    def _distance(
        self, split: torch.Tensor, whole: torch.Tensor, floor: float, inputs: Sequence[torch.Tensor]
    ) -> float:
        if split.shape != whole.shape:
            return 0.0 if self._is_by_heads(split, whole) else float("inf")
        return distance_in_all([split], [whole], floor, [x for x in inputs if x.shape == whole.shape])

    def _is_by_heads(self, split: torch.Tensor, whole: torch.Tensor) -> bool:
        """Whether an output is one of each head, as attention weights are, of which a rank has its own heads'."""
        heads = self._group.heads
        return heads > 0 and whole.dim() == 4 and whole.shape[1] == heads and split.shape[2:] == whole.shape[2:]

    @property
    def _named(self) -> str:
        owner = self._before.owner
        return f"{self._group.owner or 'The model'} ({type(owner).__name__})"

    @property
    def _remedy(self) -> str:
        if self._blocks:
            return "Leave sequence_parallel out."
        whole = ", ".join(f"{name!r}: 'replicate'" for name in self._group.layers)
        return f"Leave its layers whole: plugins=[pf.plugins.TensorParallel({self._region.degree}, plan={{{whole}}})]."

    def _refusal(self, apart: float, most: float) -> ModelError:
        what = "computes on shares of the sequence" if self._blocks else "is split"
        why = (
            "its forward looks at several tokens outside of attention"
            if self._blocks
            else "its forward looks at several of the features, or heads, of which a rank has only some"
        )
        found = (
            "outputs of other shapes"
            if apart == float("inf")
            else f"outputs, or gradients of them, that differ by {apart:.1e} of their size"
        )
        return ModelError(
            f"{self._named} {what} over tp={self._region.degree} ranks, and gives {found} from those of one process "
            f"(rounding explains {most:.0e}): {why}. {self._remedy}"
        )


class Links:
    """Sees to it, in the first training step, that blocks on shares of the sequence are given what the last returned.

    Args:
        blocks: The blocks of a run, in order.
        names: Their names.
        region: The ranks.
        change: Reads a block's hidden states.
    """

    def __init__(self, blocks: Sequence[nn.Module], names: Sequence[str], region: Region, change: Change) -> None:
        self._region, self._change = region, change
        self._names = {id(block): name for block, name in zip(blocks, names, strict=True)}
        self._last: torch.Tensor | None = None
        self._handles = [block.register_forward_hook(self._returned) for block in blocks[:-1]]
        self._handles += [block.register_forward_pre_hook(self._given, with_kwargs=True) for block in blocks[1:]]
        self._end = blocks[-1]

    def _returned(self, block: nn.Module, args: Any, output: Any) -> None:
        if _is_first(block):
            tensors = _tensors(output)
            self._last = tensors[0].detach().clone() if tensors else None

    def _given(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        if not _is_first(block):
            return
        hidden: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            hidden.append(tensor.detach())
            return tensor

        self._change(block, args, kwargs, note)
        last, self._last = self._last, None
        same = last is not None and torch.equal(last.to(hidden[0].dtype), hidden[0])
        if _largest(float(not same), block, self._region):
            raise ModelError(
                f"Under sequence_parallel=True ranks hold shares of the sequence from one block to the next, and "
                f"{self._names[id(block)]} was given something else than the block before it returned. What stands "
                "between them would see a share. Move it into a block, or leave sequence_parallel out."
            )
        if block is self._end:
            for handle in self._handles:
                handle.remove()


def _largest(value: float, module: nn.Module, region: Region) -> float:
    """The largest of what the ranks found, so that all of them refuse or none."""
    with _aside(module):  # a block that is run again would not communicate again
        found = torch.tensor([value], device=_device_of(module))
        dist.all_reduce(found, dist.ReduceOp.MAX, group=region.group)
        return found.item()


def _is_first(module: nn.Module) -> bool:
    """Whether a call is one of training, with values, and not one that is run again for its backward."""
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    return module.training and not fake and torch._C._current_graph_task_id() == -1


def _in_glue() -> bool:
    """Whether the code that runs is watched, as a pipeline watches what stands between its units."""
    from torch.overrides import _get_current_function_mode_stack

    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(getattr(mode, "watches_glue", False) for mode in stack)


@contextmanager
def _aside(owner: nn.Module) -> Iterator[None]:
    """What is compared leaves no trace: no graph, no random numbers, nothing in autocast's cache, nothing recorded."""
    from torch.utils._python_dispatch import _disable_current_modes

    device = _device_of(owner)
    cached = torch.is_autocast_cache_enabled()
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(preserved_random_state())
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(torch.no_grad())
        # What is kept for the backward inside is not what the hooks around would keep, or compute again.
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_itself, _itself))
        torch.set_autocast_cache_enabled(False)  # a cached copy that was made without a graph would have none later
        stack.callback(torch.set_autocast_cache_enabled, cached)
        yield


def _has_units(owner: nn.Module) -> bool:
    """Whether modules inside join their parameters by hooks, whose backward is not to be begun in a forward."""
    return any(hasattr(type(inner), "set_requires_gradient_sync") for inner in owner.modules() if inner is not owner)


def _device_of(module: nn.Module) -> torch.device:
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _tensors(output: Any) -> list[torch.Tensor]:
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def groups_of(
    module: nn.Module,
    attentions: Sequence[tuple[tuple[str, ...], int]],
    pairs: Sequence[tuple[str, ...]],
    kinds: Mapping[str, str],
    said: frozenset[str],
) -> list[Group]:
    """Returns the layers that are split together, without those of which the user said anything.

    Args:
        module: The model, before the split.
        attentions: The layers of each attention, and how many heads it has.
        pairs: The layers of each pair of column- and row-split ones that was derived.
        kinds: What becomes of layers that are no part of an attention.
        said: The names of which the user said something.
    """
    found = [Group(owner_of(module, layers), layers, heads) for layers, heads in attentions]
    for layers in pairs:
        owner = owner_of(module, layers)
        plain = type(module.get_submodule(owner)).forward is nn.Sequential.forward
        found.append(Group(owner, layers, proven=plain))
    taken = {name for group in found for name in group.layers}
    columns = [name for name, kind in kinds.items() if kind == "colwise" and name not in taken]
    for rows in (name for name, kind in kinds.items() if kind == "rowwise" and name not in taken):
        near = rows.rpartition(".")[0]
        while near and not any(name.startswith(f"{near}.") for name in columns):
            near = near.rpartition(".")[0]
        layers = (*(name for name in columns if not near or name.startswith(f"{near}.")), rows)
        found.append(Group(owner_of(module, layers), layers))
    return [group for group in found if said.isdisjoint(group.layers)]
