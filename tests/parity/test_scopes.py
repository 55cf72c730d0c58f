"""Scopes beside and inside each other: each trains as one process does."""

from __future__ import annotations

from functools import partial
from typing import Any

import paraflow as pf
from paraflow import scope_plans
from tests.pool import Pool
from tests.scopes.models import (
    Blocks,
    Fits,
    HeadBeside,
    Inside,
    RowsBeside,
    Staged,
    TableBeside,
    TiedBeside,
    sentences,
    vectors,
)
from tests.scopes.runs import Trained, assert_same, train

COUNT = 13  # the last batch leaves ranks without a sample
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "smoothed, accumulated": (partial(HeadBeside, 10, 0.1), {"accumulate": 2}),
    "clipped, deferred": (partial(HeadBeside, 1003), {"clip_norm": 0.1, "deferred": True}),
    "pair and norm": (partial(HeadBeside, 10, deep=True), {}),
    "by inputs": (RowsBeside, {}),
    "table": (TableBeside, {}),
    "tied": (TiedBeside, {}),
    "over 2 of 4": (partial(HeadBeside, 1003, deep=True, over=2), {"accumulate": 2, "deferred": True}),
}


def _data(name: str) -> Any:
    return sentences(COUNT) if name in ("table", "tied") else vectors(COUNT)


def train_all() -> dict[str, Trained]:
    return {name: train(model, _data(name), **fields) for name, (model, fields) in CASES.items()}


def test_splits_beside_replicas(ranks: Pool) -> None:
    one = {
        name: train(partial(model, scoped=False), _data(name), **{**fields, "deferred": False})
        for name, (model, fields) in CASES.items()
    }
    many = ranks(4, train_all)
    for name in CASES:
        assert_same([rank[name] for rank in many], one[name])
    assert many[0]["clipped, deferred"].spread == ["head.weight", "head.bias"]
    split = ("0.weight", "0.bias", "2.weight", "4.weight", "4.bias")
    assert many[0]["pair and norm"].spread == many[0]["over 2 of 4"].spread == [f"head.{name}" for name in split]
    assert many[0]["tied"].spread == ["table.weight"]


def train_inside() -> Trained:
    return train(Inside, vectors(COUNT))


def test_splits_in_a_replica(ranks: Pool) -> None:
    many = ranks(4, train_inside)
    assert_same(many, train(partial(Inside, scoped=False), vectors(COUNT)))
    assert many[0].plan.startswith("dp=2, tp=2")
    assert {name.split(".")[0] for name in many[0].spread} == {"block", "lone", "rows", "head"}


def train_stages() -> Trained:
    return train(Blocks, sentences(COUNT), deferred=True)


def test_stages_in_a_pipeline(ranks: Pool) -> None:
    many = ranks(2, train_stages)
    assert_same(many, train(partial(Blocks, scoped=False), sentences(COUNT), accumulate=4))
    assert many[0].plan.startswith("pp=2, accumulate=4")


def train_split_stages() -> tuple[Trained, Trained]:
    return train(partial(Blocks, width=2), sentences(COUNT)), train(Staged, vectors(COUNT))


def test_splits_in_stages(ranks: Pool) -> None:
    pairs, single = zip(*ranks(4, train_split_stages), strict=True)
    assert_same(list(pairs), train(partial(Blocks, scoped=False), sentences(COUNT), accumulate=4))
    assert_same(list(single), train(partial(Staged, scoped=False), vectors(COUNT), accumulate=2))
    assert pairs[0].plan.startswith("tp=2, pp=2, accumulate=4")


def train_what_does_not_fit() -> Trained:
    memory, scope_plans._memory = scope_plans._memory, lambda device: 2_000
    try:
        return train(Fits, vectors(COUNT))
    finally:
        scope_plans._memory = memory


def test_a_model_that_is_laid_out_by_itself(ranks: Pool) -> None:
    many = ranks(2, train_what_does_not_fit)
    assert_same(many, train(partial(Fits, scoped=False), vectors(COUNT)))
    assert many[0].plan.startswith("pp=2")


def train_twice() -> None:
    model, data = Blocks(), sentences(COUNT)
    trainer = pf.Trainer(max_epochs=1, progress=False)
    trainer.evaluate(model, data, batch_size=8)
    for again in (trainer, pf.Trainer(max_epochs=1, progress=False)):
        again.fit(model, data, batch_size=8)


def test_a_model_of_which_each_rank_has_a_stage_is_trained_again(ranks: Pool) -> None:
    ranks(2, train_twice)
