"""Blocks are what a model repeats, or what the user names."""

from __future__ import annotations

from torch import nn

from paraflow.recompute import matching_blocks, repeated_blocks
from tests.recompute.models import MLP


def two() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


def test_repeats_are_found_in_lists_and_sequences_at_any_depth() -> None:
    net = nn.ModuleDict(
        {
            "stem": nn.Linear(2, 2),
            "encoder": nn.ModuleList([MLP(), MLP()]),
            "decoder": nn.Sequential(two(), nn.ReLU(), two()),
            "one": nn.Sequential(nn.ModuleDict({"a": MLP(), "b": MLP()})),
        }
    )
    assert list(repeated_blocks(net)) == ["encoder.0", "encoder.1", "decoder.0", "decoder.2", "one.0.a", "one.0.b"]


def test_of_nested_repeats_the_outermost_count() -> None:
    net = nn.Sequential(nn.Sequential(two(), two()), nn.Sequential(two(), two()))
    assert list(repeated_blocks(net)) == ["0", "1"]


def test_a_block_that_is_there_twice_counts_once() -> None:
    block = MLP()
    assert list(repeated_blocks(nn.ModuleList([block, MLP(), block]))) == ["0", "1"]


def test_a_model_without_repeats_is_divided_into_its_children() -> None:
    assert list(repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))) == ["0", "2"]


def test_patterns_name_modules_and_lists_stand_for_what_they_hold() -> None:
    net = nn.ModuleDict({"head": nn.Linear(2, 2), "blocks": nn.ModuleList([MLP(), MLP()])})
    assert list(matching_blocks(net, ["blocks"])) == ["blocks.0", "blocks.1"]
    assert list(matching_blocks(net, ["blocks.*"])) == ["blocks.0", "blocks.1"]
    assert list(matching_blocks(net, ["*.up", "head"])) == ["head", "blocks.0.up", "blocks.1.up"]
    assert matching_blocks(net, ["layers"]) == {}
