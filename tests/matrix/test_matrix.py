"""Each pair of the compatibility table: trains as one process does, or is refused by its own rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import paraflow as pf
from paraflow.compatibility import FEATURES, Pair, pairs
from paraflow.compatibility.entries import LAYOUTS, MEMORY
from tests.matrix.comparison import assert_loads_alike, assert_trained_alike
from tests.matrix.models import CASES
from tests.matrix.training import BATCH, Job, trainer_of

ALL = list(pairs())


TELLING = ("tp 4", "pp 4", "fsdp 2 × tp 2", "dp 2 × pp 2", "tp 2 × pp 2")
SPARING = ("fsdp 2 × tp 2", "dp 2 × pp 2")  # of them all that saves memory is quick, too
EVERYWHERE = ("nothing else", "accumulation", "tied weights", "dropout", "resume from one device")


def _is_slow(pair: Pair) -> bool:
    """Whether a pair is left to the slow tests: of layers that are divided, what others nearly show."""
    layout, feature = pair.strategy, pair.feature
    if "compile" in pair.fields or not layout.divides_layers:
        return "compile" in pair.fields
    if feature in MEMORY:
        return layout.name not in SPARING
    return layout.name not in TELLING and feature.name not in EVERYWHERE


def _marked(pair: Pair) -> Any:
    together = pytest.mark.xdist_group(f"{pair.strategy.name} on {pair.ranks}")  # they are trained in one call
    return pytest.param(pair, id=pair.name, marks=[together, *([pytest.mark.slow] if _is_slow(pair) else [])])


def test_what_is_left_to_the_slow_tests_is_named_as_in_the_table() -> None:
    layouts = {layout.name for layout in LAYOUTS if layout.divides_layers}
    assert layouts.issuperset((*TELLING, *SPARING))
    assert {feature.name for feature in FEATURES}.issuperset(EVERYWHERE)


@pytest.mark.matrix
@pytest.mark.timeout(600)  # the first of a strategy's tests trains all its pairs
@pytest.mark.parametrize("pair", [_marked(pair) for pair in ALL if pair.verdict.legal])
def test_a_legal_pair_trains_as_one_process_does(trained: Callable[[Pair], Any], pair: Pair) -> None:
    outcome, folder = trained(pair)
    assert_trained_alike(pair, outcome)
    assert_loads_alike(pair, outcome, folder)


@pytest.mark.matrix
@pytest.mark.parametrize("pair", [pytest.param(p, id=p.name) for p in ALL if not p.verdict.legal])
def test_an_illegal_pair_is_refused_by_its_rule(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": pair.ranks, "LOCAL_WORLD_SIZE": pair.ranks}.items():
        monkeypatch.setenv(name, str(value))
    case = CASES[pair.run]
    with pytest.raises(pf.PlanError) as caught:
        trainer_of(Job(pair.fields, pair.run)).fit(case.model(), case.data(case.count), batch_size=BATCH)
    assert not dist.is_initialized()
    assert caught.value.rule == pair.verdict.broken[0].id
    for rule in pair.verdict.broken:
        assert rule.explain(pair.verdict.facts) in str(caught.value)
