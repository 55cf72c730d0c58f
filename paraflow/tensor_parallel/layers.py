"""Linear layers split over the ranks of a region, in place: names, and classes, stay.

A parameter becomes a DTensor, of which this rank holds a part; forward multiplies with the part, read when it is
needed, so that whatever gathers parameters for a layer (FSDP) may do so before. Activations are plain tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from paraflow.errors import ModelError
from paraflow.parts import is_spread
from paraflow.tensor_parallel.region import Region


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer that can be split: torch's, ours, or transformers' Conv1D.

    A subclass with a forward of its own is none, since splitting replaces it.

    Example:
        >>> is_linear(nn.Linear(2, 3)), is_linear(nn.Bilinear(2, 2, 2))
        (True, False)
    """
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward or _is_split(module)
    return has_inputs_first(module)


def features_of(module: nn.Module) -> tuple[int, int]:
    """A linear layer's (input, output) features, of the whole layer.

    Example:
        >>> features_of(nn.Linear(2, 3))
        (2, 3)
    """
    weight: Any = module.weight
    outputs, inputs = weight.shape
    return (outputs, inputs) if has_inputs_first(module) else (inputs, outputs)


def split_columns(module: nn.Module, region: Region, *, parts: int = 1, joins: bool = False) -> None:
    """Splits a linear layer's outputs: each rank computes some of them, from the whole input.

    Args:
        module: An `nn.Linear`, or transformers' Conv1D. Its weights may be on the meta device.
        region: The ranks.
        parts: How many projections it computes at once, one behind the other, as fused queries, keys and values are
            three: each is split by itself, so that a rank's outputs are its part of each.
        joins: Whether the outputs are joined, so that what follows sees all of them.

    Raises:
        ModelError: It is no linear layer, or its parts cannot be divided evenly.
    """
    require_linear(module)
    outputs = features_of(module)[1]
    if region.degree == 1:
        return
    if parts > 1 and (joins or outputs % (parts * region.degree)):
        raise ModelError(
            f"A layer of {outputs} outputs in {parts} parts cannot be split over {region.degree} ranks: each part's "
            "outputs must be a multiple of the ranks, and are not joined. Leave the layer whole ('replicate')."
        )
    split_parameter(module, "weight", region, 1 if has_inputs_first(module) else 0, parts)
    if module.bias is not None:
        split_parameter(module, "bias", region, 0, parts)
    set_forward(module, _joined_columns if joins else _columns, region)


def split_rows(module: nn.Module, region: Region) -> None:
    """Splits a linear layer's inputs: each rank has some of them, and the outputs are summed over the ranks.

    The bias stays whole and is added once, after the sum. With `gathers=1` it is added to shares of the sequence, and
    its gradient on each rank is that of its share.

    Args:
        module: An `nn.Linear`, or transformers' Conv1D. Its weights may be on the meta device.
        region: The ranks.

    Raises:
        ModelError: It is no linear layer.
    """
    require_linear(module)
    if region.degree == 1:
        return
    split_parameter(module, "weight", region, 0 if has_inputs_first(module) else 1)
    set_forward(module, _rows, region)


def multiply(x: torch.Tensor, module: nn.Module, bias: torch.Tensor | None) -> torch.Tensor:
    """This rank's part of a linear layer, applied to what is inside the region."""
    weight = local_part(module.weight)
    return functional.linear(x, weight.t() if has_inputs_first(module) else weight, bias)


def local_part(tensor: Any) -> torch.Tensor:
    """What this rank holds of a parameter, differentiably."""
    return tensor.to_local() if is_spread(tensor) else tensor  # type: ignore[no-any-return]


def local_bias(module: nn.Module) -> torch.Tensor | None:
    """What this rank holds of a layer's bias, differentiably."""
    return None if module.bias is None else local_part(module.bias)


def _columns(module: nn.Module, region: Region, x: torch.Tensor) -> torch.Tensor:
    return multiply(region.enter(x), module, local_bias(module))


def _joined_columns(module: nn.Module, region: Region, x: torch.Tensor) -> torch.Tensor:
    return region.join(_columns(module, region, x), features_of(module)[1])


def _rows(module: nn.Module, region: Region, x: torch.Tensor) -> torch.Tensor:
    inputs = features_of(module)[0]
    if x.shape[-1] == inputs:  # what stands before is not split
        x = _own_features(x, region)
    elif x.shape[-1] != region.sizes_of(inputs)[region.rank]:
        raise ModelError(
            f"A layer that is split by its {inputs} inputs over {region.degree} ranks was given {x.shape[-1]} features "
            f"on rank {region.rank}; it takes all, or this rank's {region.sizes_of(inputs)[region.rank]}. Split the "
            "layer before it by its outputs, or leave this one whole."
        )
    summed = region.leave(multiply(x, module, None))
    bias = local_bias(module)
    return summed if bias is None else summed + bias


def _own_features(x: torch.Tensor, region: Region) -> torch.Tensor:
    """This rank's features of an input that is whole outside."""
    if region.gathers is None:
        return region.split_last(x)
    start, end = region.range_of(x.shape[-1])
    return region.enter(x)[..., start:end]


def split_parameter(module: nn.Module, name: str, region: Region, dim: int, parts: int = 1) -> None:
    """Leaves this rank its part of a parameter, seen as a DTensor of the whole.

    A parameter that another module has as well is one parameter afterwards, where both are split alike.

    Args:
        module: The module that has it.
        name: Its name there.
        region: The ranks.
        dim: The dimension that is divided.
        parts: Into how many equal pieces it is cut first, each of which is divided by itself.

    Raises:
        ModelError: It is split already, in another way.
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    held: Any = getattr(module, name)
    known = region.replaced.get(id(held))
    before = known[1] if known is not None and known[0]() is held else held
    placement: Any = _StridedShard(dim, split_factor=parts) if parts > 1 else Shard(dim)
    if is_spread(before):
        if before.device_mesh != region.device_mesh or before.placements != (placement,):
            raise ModelError(
                f"{type(module).__name__}.{name} is to be split as {placement}, and is already split as "
                f"{before.placements}, perhaps because another layer has the same weight. Split both alike, or neither."
            )
        module.register_parameter(name, before)
        return
    part = part_of(held, region, dim, parts)
    module.register_parameter(name, part)
    region.replaced[id(held)] = weakref.ref(held), part


def part_of(whole: nn.Parameter, region: Region, dim: int, parts: int = 1) -> nn.Parameter:
    """A parameter that stands for a whole one, and holds this rank's part of it; see `split_parameter`."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor.placement_types import _StridedShard

    assert region.device_mesh is not None
    placement: Any = _StridedShard(dim, split_factor=parts) if parts > 1 else Shard(dim)
    start, end = region.range_of(whole.shape[dim] // parts)
    pieces = whole.detach().tensor_split(parts, dim)
    # A copy, so that the whole one's memory is let go; on the meta device there is none.
    mine = torch.cat([piece.narrow(dim, start, end - start) for piece in pieces], dim).contiguous()
    held = mine.clone() if mine.data_ptr() == whole.data_ptr() and not whole.is_meta else mine
    spec = DTensorSpec(
        region.device_mesh, (placement,), tensor_meta=TensorMeta(whole.shape, whole.stride(), whole.dtype)
    )
    make: Any = DTensor  # by its layout and not from_local, which would move what is on the meta device
    part = nn.Parameter(make(held, spec, requires_grad=False), whole.requires_grad)
    part.__dict__.update(whole.__dict__)
    hooks: Any = whole._backward_hooks, whole._post_accumulate_grad_hooks
    part._backward_hooks, part._post_accumulate_grad_hooks = hooks
    return part


def set_forward(module: nn.Module, forward: Callable[..., torch.Tensor], region: Region) -> None:
    """Replaces a module's forward, on the instance, by a function of (module, region, inputs...)."""
    module.forward = MethodType(Bound(forward, region), module)


class Bound:
    """A function of (module, region, inputs...), to be bound to a module; copies of the module keep it."""

    def __init__(self, forward: Callable[..., torch.Tensor], region: Region) -> None:
        self.forward = forward
        self.region = region

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs it."""
        return self.forward(module, self.region, *args, **kwargs)


def _is_split(module: nn.Module) -> bool:
    return isinstance(getattr(vars(module).get("forward"), "__func__", None), Bound)


def has_inputs_first(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D, whose weight is [inputs, outputs]; known by name, not to import it."""
    kind = next((k for k in type(module).__mro__ if k.__name__ == "Conv1D" and "transformers" in k.__module__), None)
    return kind is not None and (type(module).forward is kind.__dict__.get("forward") or _is_split(module))


def require_linear(module: nn.Module) -> None:
    """Refuses what is no linear layer that can be split.

    Raises:
        ModelError: It is none.
    """
    if not is_linear(module):
        raise ModelError(
            f"{type(module).__name__} is no linear layer that can be split; it takes an nn.Linear or transformers' "
            "Conv1D whose forward is its class's own. Leave the module whole ('replicate')."
        )
