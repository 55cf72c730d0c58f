"""Which submodules are gathered together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paraflow as pf
from paraflow.plugins.units import find_units, rest_of


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


class Language(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 64, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def names(model: nn.Module, asked: object = None) -> list[str]:
    return [unit.name for unit in find_units(model, asked)]  # type: ignore[arg-type]


def test_blocks_and_large_layers_are_found_and_embeddings_stay_with_the_whole() -> None:
    model = Language()
    units = find_units(model)
    assert [unit.name for unit in units] == ["blocks.0", "blocks.1", "blocks.2", "head"]
    assert units[0].bytes == 4 * (8 * 8 + 8 + 16)
    assert rest_of(model, units).bytes == 4 * 64 * 8
    assert sum(unit.bytes for unit in [*units, rest_of(model, units)]) == sum(p.nbytes for p in model.parameters())


def test_tied_weights_stay_with_the_whole() -> None:
    assert names(Language(tied=True)) == ["blocks.0", "blocks.1", "blocks.2"]
    model = Language()
    model.blocks[2].linear.weight = model.blocks[0].linear.weight  # type: ignore[union-attr]
    assert names(model) == ["blocks.1", "head"]


def test_small_layers_stay_with_the_whole() -> None:
    layers = nn.Sequential(nn.Conv2d(8, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64))
    assert names(layers) == ["0", "3"]


def test_a_layer_that_uses_the_weights_of_its_parts_is_one_unit() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "out": nn.Linear(8, 8)})
    assert names(model) == ["attention", "out"]
    assert names(nn.Linear(8, 8)) == []


def test_what_is_never_called_is_no_unit() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    model = nn.ModuleDict({"parts": nn.ModuleList(Parts() for _ in range(2)), "out": nn.Linear(8, 8)})
    model["weights"] = nn.ParameterList([torch.zeros(8, 8)])
    assert names(model) == ["parts.0.linear", "parts.1.linear", "out"]
    with pytest.raises(pf.ModelError, match=r"parts\.0 is a Parts, which has no forward; leave it out"):
        find_units(model, ["parts.0"])


def test_a_block_that_is_used_twice_is_one_unit() -> None:
    block = Block()
    assert names(nn.Sequential(block, block, nn.Linear(8, 8))) == ["0", "2"]


def test_the_user_names_units() -> None:
    model = Language()
    assert names(model, ["blocks.*"]) == ["blocks.0", "blocks.1", "blocks.2"]
    assert names(model, [nn.LayerNorm, "head"]) == ["blocks.0.norm", "blocks.1.norm", "blocks.2.norm", "head"]
    assert names(model, []) == []
    nested = find_units(model, ["blocks.0", "blocks.0.linear"])
    assert [(unit.name, unit.bytes) for unit in nested] == [("blocks.0", 4 * 16), ("blocks.0.linear", 4 * (64 + 8))]
    model.fsdp_units = [Block]  # type: ignore[assignment]
    assert names(model) == ["blocks.0", "blocks.1", "blocks.2"]


def test_what_cannot_be_a_unit_is_refused() -> None:
    model = Language(tied=True)
    with pytest.raises(pf.ModelError, match=r"No module of Language matches the unit 'layers\.\*'; there are emb"):
        find_units(model, ["layers.*"])
    with pytest.raises(pf.ModelError, match=r"blocks is a ModuleList, which has no forward; write units=\['blocks\."):
        find_units(model, ["blocks"])
    with pytest.raises(pf.ModelError, match="head shares a parameter with a module outside of it"):
        find_units(model, ["head"])
    with pytest.raises(pf.ModelError, match="module class or a pattern of module names, not 3"):
        find_units(model, [3])  # type: ignore[list-item]
    mixed = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).to(torch.bfloat16))
    with pytest.raises(pf.ModelError, match=r"torch\.bfloat16, torch\.float32, which cannot be sharded together"):
        rest_of(mixed, [])
    assert len(find_units(mixed)) == 2
    with pytest.raises(pf.ModelError, match=r"^0 was made with sparse=True.*nn\.EmbeddingBag\(\.\.\., sparse=False\)"):
        find_units(nn.Sequential(nn.EmbeddingBag(4, 8, sparse=True)))
    model.register_parameter("temperature", nn.Parameter(torch.ones(())))
    with pytest.raises(pf.ModelError, match=r"temperature of Language: a parameter of no dimension cannot be sharded"):
        find_units(model)
