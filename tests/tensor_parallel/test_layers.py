"""Split layers give what whole ones give, forward and backward, whatever ranks hold outside."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from paraflow.errors import DataError, ModelError
from paraflow.nn import Linear
from paraflow.parts import as_part, box_of, is_spread, local, whole
from paraflow.tensor_parallel.layers import is_linear, split_columns, split_rows
from paraflow.tensor_parallel.region import Region
from paraflow.tensor_parallel.vocabulary import split_vocabulary
from tests.pool import Pool
from tests.tensor_parallel.regions import assert_same_gradients, close, my_share, region_of_all, twice


class Mlp(nn.Module):
    """Two layers with a nonlinearity between."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x)))  # type: ignore[no-any-return]


class Fused(nn.Module):
    """Queries, keys and values of one layer, mixed feature by feature."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        return self.out(query * key.sigmoid() + value)  # type: ignore[no-any-return]


MODULES: dict[str, Any] = {
    "torch": lambda: Mlp(nn.Linear(8, 12), nn.Linear(12, 8)),
    "ours, without biases": lambda: Mlp(Linear(8, 12, bias=False, std=0.5), Linear(12, 8, bias=False, std=0.5)),
    "transformers": lambda: Mlp(Conv1D(12, 8), Conv1D(8, 12)),
    "uneven": lambda: Mlp(nn.Linear(8, 10), nn.Linear(10, 8)),
    "fewer features than ranks": lambda: Mlp(nn.Linear(8, 3), nn.Linear(3, 8)),
}


def split(mlp: Mlp, region: Region) -> Mlp:
    split_columns(mlp.up, region)
    split_rows(mlp.down, region)
    return mlp


def mean_over_ranks(parameter: torch.Tensor, region: Region) -> None:
    """What data parallelism does to the gradients of whole parameters."""
    if parameter.grad is not None and not is_spread(parameter):
        torch.distributed.all_reduce(parameter.grad, group=region.group)
        if region.gathers == 0:
            parameter.grad /= region.degree


def compare(module: nn.Module, region: Region, change: Any, sizes: tuple[int, ...] | None = None, **how: Any) -> None:
    """Runs a split module on this rank's share, and the whole one on all; compares outputs and all gradients."""
    dtype, tolerance = how.get("dtype", torch.float32), how.get("tolerance", 1e-6)
    split_one, unsplit = twice(module.to(dtype))
    change(split_one, region)
    x = torch.randn(7 if sizes is None else sum(sizes), 5, 8, dtype=dtype)
    outside = my_share(x, region, sizes)
    x.requires_grad_()
    expected, found = unsplit(x), split_one(outside)
    close(found, my_share(expected, region, sizes), tolerance, "output")
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    mine = (found * my_share(weights, region, sizes)).sum()
    if region.gathers == 0:  # a rank's loss, of which the engine's is the mean
        mine = mine * region.degree
    mine.backward()
    close(outside.grad, my_share(x.grad, region, sizes) * (region.degree if region.gathers == 0 else 1), tolerance)
    if region.gathers is not None:
        for parameter in split_one.parameters():
            mean_over_ranks(parameter, region)
    assert_same_gradients(split_one, unsplit, tolerance)


def every_layer() -> None:
    for gathers in (None, 0, 1):
        region = region_of_all(gathers)
        for make in MODULES.values():
            compare(make(), region, split)
        compare(MODULES["torch"](), region, split, dtype=torch.bfloat16, tolerance=0.05)
        compare(Fused(8), region, split_fused)
        compare(nn.Linear(8, 8), region, split_rows)
    region = region_of_all(0)
    sizes = (3, 1, 4, 0)[: region.degree]
    compare(MODULES["torch"](), region, split, sizes)
    compare(nn.Linear(8, 6), region, split_joined, sizes)
    compare(nn.Linear(8, 7), region_of_all(), split_joined)


def split_joined(layer: nn.Module, region: Region) -> None:
    split_columns(layer, region, joins=True)


def split_fused(module: Any, region: Region) -> None:
    split_columns(module.qkv, region, parts=3)
    split_rows(module.out, region)


def layouts() -> None:
    """Parts are torch's: whole again, on the meta device, copied, tied, frozen, and once."""
    region = region_of_all()
    fused = nn.Linear(4, 24)
    before = fused.weight.detach().clone()
    split_columns(fused, region, parts=3)
    close(whole(fused.weight), before, 0)
    assert local(fused.weight).numel() == before.numel() // region.degree
    with torch.device("meta"):
        later = nn.Linear(4, 10)
    split_columns(later, region)
    assert later.weight.is_meta
    assert tuple(later.weight.shape) == (10, 4)
    value = torch.randn(10, 4)
    later.weight = nn.Parameter(as_part(value[box_of(later.weight)].clone(), later.weight))
    close(whole(later.weight), value, 0)
    first, second = nn.Linear(4, 8), nn.Linear(4, 8, bias=False)
    second.weight = first.weight
    first.weight.requires_grad_(False)
    split_columns(first, region)
    split_columns(second, region)
    assert first.weight is second.weight
    assert not first.weight.requires_grad
    copied = copy.deepcopy(first)
    assert copied.weight is not first.weight
    with torch.no_grad():
        copied.weight.zero_()
        copied.bias.zero_()
    assert copied(torch.ones(1, 4)).eq(0).all()
    assert is_linear(copied)
    with pytest.raises(ModelError, match="already split"):
        split_rows(second, region)
    with pytest.raises(ModelError, match="must be a multiple"):
        split_columns(nn.Linear(4, 3 * region.degree + 3), region, parts=3)


def shared_inputs() -> None:
    """Queries, keys and values sum the gradient of their input once; and what a rank cannot join is refused."""
    region = region_of_all()
    layers = [nn.Linear(4, 8) for _ in range(3)]
    for layer in layers:
        split_columns(layer, region)
    x = torch.randn(2, 4, requires_grad=True)
    hidden = x * 2
    one, two = layers[0](hidden), layers[1](hidden)
    assert one.grad_fn.next_functions[1][0] is two.grad_fn.next_functions[1][0]
    del hidden
    assert region._entered is None  # what came in is let go with the last use of its input
    outside = layers[0](x.detach())
    with torch.inference_mode():  # where torch counts no changes: what came in is brought in anew
        same = x * 1.0
        torch.testing.assert_close(layers[0](same), outside)
        torch.testing.assert_close(layers[0](same.mul_(2)), layers[0](x * 2.0))
    rows = nn.Linear(4, 4)
    split_rows(rows, region)
    with pytest.raises(ModelError, match="was given 3 features"):
        rows(torch.ones(1, 3))
    pooled = region_of_all(0)
    layer = nn.Linear(4, 8)
    split_columns(layer, pooled)
    with pytest.raises(DataError, match="Pad the batches"):
        layer(torch.ones(2, 3 + pooled.rank, 4))


def embeddings() -> None:
    for gathers in (None, 0, 1):
        region = region_of_all(gathers)
        for rows, padding in ((11, None), (11, 2), (11, 10), (5, 0)):
            split_one, unsplit = twice(nn.Embedding(rows, 6, padding_idx=padding))
            split_vocabulary(split_one, region)
            indices = torch.randint(0, rows, (4, 7))
            expected = unsplit(indices)
            found = split_one(my_share(indices, region) if gathers == 0 else indices)
            close(found, my_share(expected, region), 0, "rows")
            weights = torch.randn_like(expected)
            (expected * weights).sum().backward()
            scale = region.degree if gathers == 0 else 1
            (found * my_share(weights, region)).sum().mul(scale).backward()
            assert_same_gradients(split_one, unsplit)
    with pytest.raises(ModelError, match="max_norm"):
        split_vocabulary(nn.Embedding(5, 6, max_norm=1.0), region_of_all())


def everything() -> None:
    torch.manual_seed(0)
    every_layer()
    embeddings()
    layouts()
    shared_inputs()


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_split_layers_are_the_whole_ones(ranks: Pool, world_size: int) -> None:
    ranks(world_size, everything)


def test_one_rank_splits_nothing() -> None:
    region = Region(None)
    layer = nn.Linear(4, 8)
    split_columns(layer, region)
    split_rows(layer, region)
    assert not is_spread(layer.weight)
    assert "forward" not in vars(layer)


def test_a_layer_with_a_forward_of_its_own_is_refused() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    with pytest.raises(ModelError, match="whose forward is its class's own"):
        split_columns(Doubled(2, 2), Region(None))
