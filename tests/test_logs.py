from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paraflow.logs import Logs


def logs() -> Logs:
    return Logs(loss=torch.tensor(0.5), lr=0.1, vector=torch.zeros(2))


READS: dict[str, Callable[[Logs], Any]] = {
    "[]": lambda logs: logs["loss"],
    "get": lambda logs: logs.get("loss"),
    "items": lambda logs: dict(logs.items())["loss"],
    "values": lambda logs: next(iter(logs.values())),
    "spread": lambda logs: {**logs}["loss"],
    "dict": lambda logs: dict(logs)["loss"],
    "update": lambda logs: _updated(logs)["loss"],
    "copy": lambda logs: logs.copy()["loss"],
    "or": lambda logs: (logs | {"epoch": 1})["loss"],
    "pop": lambda logs: logs.pop("loss"),
    "format": lambda logs: float("{loss}".format(**logs)),
    "format_map": lambda logs: float("{loss}".format_map(logs)),
}


def _updated(logs: Logs) -> dict[str, Any]:
    plain: dict[str, Any] = {"epoch": 1}
    plain.update(logs)
    return plain


@pytest.mark.parametrize("way", READS)
def test_numbers_come_out_whatever_way_they_are_read(way: str) -> None:
    value = READS[way](logs())
    assert type(value) is float
    assert value == 0.5


def test_nothing_waits_until_it_is_read() -> None:
    made = logs()
    assert isinstance(dict.__getitem__(made, "loss"), torch.Tensor)
    assert len(made) == 3
    assert "loss" in made
    assert list(made) == ["loss", "lr", "vector"]
    assert isinstance(dict.__getitem__(made, "loss"), torch.Tensor)
    made["loss"]
    assert dict.__getitem__(made, "loss") == 0.5


def test_the_rest_of_a_dict() -> None:
    made = logs()
    assert made.get("accuracy", 7) == 7
    assert made.get("accuracy") is None
    with pytest.raises(KeyError):
        made["accuracy"]
    assert made["vector"].shape == (2,)
    assert json.loads(json.dumps(Logs(loss=torch.tensor(0.5), step=torch.tensor(3)))) == {"loss": 0.5, "step": 3}
