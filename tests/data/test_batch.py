from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from transformers import BatchEncoding

from paraflow.data.batch import count_rows, map_tensors, take_rows
from paraflow.errors import DataError


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Loose:
    x: Any
    y: Any


@dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any


CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "dict": lambda x, y: {"x": x, "y": y},
    "ordered dict": lambda x, y: OrderedDict(x=x, y=y),
    "named tuple": Pair,
    "dataclass": Loose,
    "frozen dataclass": Frozen,
    "nested": lambda x, y: {"inputs": (x, {"deep": [x]}), "y": Frozen(Pair(y, y), y)},
    "transformers": lambda x, y: BatchEncoding({"x": x, "y": y}),
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, (dict, BatchEncoding)):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    return same((one.x, one.y), (other.x, other.y))


@pytest.mark.parametrize("kind", CONTAINERS)
def test_rows_are_taken_from_all_tensors_of_a_container(kind: str) -> None:
    x, y = torch.arange(10.0).reshape(5, 2), torch.arange(5)
    make = CONTAINERS[kind]
    assert count_rows(make(x, y)) == 5
    assert same(take_rows(make(x, y), 1, 4), make(x[1:4], y[1:4]))
    assert same(take_rows(make(x, y), 0, 5), make(x, y))
    assert same(take_rows(make(x, y), 2, 2), make(x[:0], y[:0]))
    assert same(map_tensors(lambda t: t * 2, make(x, y)), make(x * 2, y * 2))


def test_what_has_no_entry_a_sample_comes_along_whole() -> None:
    batch = {
        "scale": torch.tensor(2.0),
        "x": torch.arange(4),
        "table": torch.zeros(7, 2),
        "names": list("abcd"),
        "n": 3,
    }
    taken = take_rows(batch, 1, 3, rows=4)
    assert count_rows(batch) == 4
    assert taken["x"].tolist() == [1, 2]
    assert taken["names"] == ["b", "c"]
    assert taken["scale"].item() == 2.0
    assert taken["table"].shape == (7, 2)
    assert taken["n"] == 3


def test_a_mapping_that_is_not_made_from_one_becomes_a_dict() -> None:
    batch: dict[str, torch.Tensor] = defaultdict(torch.Tensor, x=torch.arange(3))
    assert map_tensors(lambda t: t + 1, batch)["x"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("batch", ["text", {"names": ["a", "b"]}, torch.tensor(3.0), [], None, (1, 2)])
def test_a_batch_without_rows_is_refused(batch: Any) -> None:
    with pytest.raises(DataError, match=rf"type {type(batch).__name__} holds no tensor.*first dimension"):
        count_rows(batch)
