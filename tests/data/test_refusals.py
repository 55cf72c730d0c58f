"""Bad input gets a sentence, before anything is trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, TensorDataset

from paraflow.data import PerRank, as_source
from paraflow.errors import DataError
from tests.data.reading import Numbers, read


class Endless(Sampler[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


class Stream(IterableDataset[int]):
    pass


@dataclass
class Settings:
    rate: float


LOADER = DataLoader(Numbers(6), batch_size=3)
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "text": ("train.csv", None, r"'train\.csv'; give arrays"),
    "path": (Path("train.csv"), None, r"PosixPath; give arrays"),
    "nothing": (None, None, r"None; give arrays"),
    "number": (3, None, r"a int; give arrays"),
    "settings": (Settings(0.1), None, r"a Settings; give arrays"),
    "no rows": (torch.zeros(0, 3), None, r"no sample"),
    "no rows in a dict": ({"x": np.zeros((0, 3)), "y": np.zeros(0)}, None, r"no sample"),
    "ragged": ((torch.zeros(5, 3), torch.zeros(4)), None, r"different numbers of samples.*\(5, 3\), \(4,\)"),
    "scalar among arrays": ((torch.zeros(5, 3), torch.tensor(1.0)), None, r"different numbers of samples"),
    "text arrays": (np.array(["a", "b"]), None, r"training data.*(dtype|type|<U1|str)"),
    "arrays and lists": ((torch.zeros(3, 2), [0, 1, 0]), None, r"training data"),
    "dict of lists": ({"x": [1.0, 2.0], "y": [0, 1]}, None, r"training data"),
    "empty list": ([], None, r"training data.*(no sample|no batch)"),
    "empty dict": ({}, None, r"training data"),
    "empty dataset": (Numbers(0), None, r"no sample.*len\(Numbers\) is 0"),
    "empty loader": (DataLoader(TensorDataset(torch.zeros(0))), None, r"without a sample"),
    "nothing left by drop_last": (DataLoader(Numbers(2), batch_size=3, drop_last=True), None, r"drop_last"),
    "empty batch sampler": (DataLoader(Numbers(2), batch_sampler=BatchSampler([], 2, False)), None, r"no batch"),
    "sampler without length": (DataLoader(Numbers(3), sampler=Endless()), None, r"Endless.*__len__"),
    "another batch size": (LOADER, 4, r"batch_size=3.*batch_size=4.*one place"),
    "batch size and batch sampler": (
        DataLoader(Numbers(4), batch_sampler=BatchSampler(range(4), 2, False)),
        4,
        r"batch_size=4.*batch_sampler of its own",
    ),
    "batch size and ready-made batches": (DataLoader(Numbers(4), batch_size=None), 4, r"batch_size=4.*ready-made"),
    "batch size and iterable": (iter([torch.zeros(2)]), 4, r"batch_size=4.*whole batches"),
    "batch size and per-rank stream": (PerRank([torch.zeros(2)]), 4, r"batch_size=4.*per-rank"),
    "batch size 0": (torch.zeros(4), 0, r"at least 1, not 0"),
    "batch size below 0": (torch.zeros(4), -2, r"at least 1, not -2"),
    "batch size True": (torch.zeros(4), True, r"whole number.*not True"),
    "batch size 2.0": (torch.zeros(4), 2.0, r"whole number.*not 2\.0"),
    "batch size as text": (torch.zeros(4), "8", r"whole number.*not '8'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_sentence(case: str) -> None:
    data, batch_size, sentence = REFUSED[case]
    with pytest.raises(DataError, match=sentence) as caught:
        as_source(data, batch_size=batch_size, shuffle=True, name="training data")
    assert str(caught.value).rstrip().endswith((".", ")"))


def test_the_loaders_own_batch_size_may_be_said_again() -> None:
    assert as_source(LOADER, batch_size=3, shuffle=True).batch_size == 3


@pytest.mark.parametrize("batch", ["text", {"names": ["a"]}, torch.tensor(1.0)])
def test_a_batch_without_tensors_is_refused(batch: Any) -> None:
    with pytest.raises(DataError, match="holds no tensor with a first dimension"):
        read(as_source(lambda: iter([batch]), batch_size=None, shuffle=False))
