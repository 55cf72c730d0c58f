"""The seams hold: strategies that the package does not know train to the right weights, alone and with its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import paraflow as pf
from tests.parity.runs import Measured, assert_same, by_hand, by_trainer
from tests.parity.tasks import CASES
from tests.plugins.toy_pipeline import ToyPipeline
from tests.plugins.toy_shard import ToyShard

BATCH = 10


def sharded(name: str, count: int, degree: int, **plan: Any) -> Measured:
    return by_trainer(name, count, BATCH, plugins=[ToyShard(degree)], **plan)


def piped(count: int, **plan: Any) -> Measured:
    return by_trainer("classification", count, BATCH, plugins=[ToyPipeline(cut=2)], **plan)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("world_size", "degree"), [(2, 2), (3, 3), (4, 2)])
@pytest.mark.parametrize("name", ["classification", "token sums", "own loss"])
def test_shards_train_alike(ranks: Any, name: str, world_size: int, degree: int, accumulate: int) -> None:
    reference = by_hand(name, 21, BATCH, clip_norm=0.2)
    for measured in ranks(world_size, sharded, name, 21, degree, accumulate=accumulate, clip_norm=0.2):
        assert_same(measured, reference)


@pytest.mark.parametrize(("world_size", "accumulate"), [(2, 1), (2, 3), (4, 2)])
def test_pipeline_trains_alike(ranks: Any, world_size: int, accumulate: int) -> None:
    reference = by_hand("classification", 23, BATCH, clip_norm=0.2)
    for measured in ranks(world_size, piped, 23, accumulate=accumulate, clip_norm=0.2):
        assert_same(measured, reference)


def resumed(folder: str, stop_at: int | None, resume: bool, degree: int) -> dict[str, Any]:
    plugins = [ToyShard(degree)] if degree > 1 else []
    trainer = pf.Trainer(
        max_epochs=2,
        max_steps=stop_at,
        seed=5,
        progress=False,
        plugins=plugins,
        callbacks=[pf.callbacks.Checkpoint(folder)],
    )
    case = CASES["classification"]
    trainer.fit(case.model(), case.data(23), batch_size=BATCH, resume=folder if resume else None)
    return {name: value.clone() for name, value in trainer.engine.state_dict()["model"].items()}


@pytest.mark.parametrize(("first", "second"), [(2, 2), (2, 1), (1, 3)])
def test_a_run_saved_under_one_plan_goes_on_under_another(ranks: Any, tmp_path: Path, first: int, second: int) -> None:
    reference = by_hand("classification", 23, BATCH)
    ranks(first, resumed, str(tmp_path), 4, False, first)
    for parameters in ranks(second, resumed, str(tmp_path), None, True, second):
        for name, value in reference.parameters.items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-5, atol=1e-6)


def test_shards_in_fp16_agree_on_what_is_finite(ranks: Any) -> None:
    reference = by_hand("classification", 23, BATCH)
    for measured in ranks(2, sharded, "classification", 23, 2, precision="fp16"):
        for name, parameter in reference.parameters.items():
            assert (measured.parameters[name] - parameter).abs().max() < 1e-2


def test_two_runners_are_refused() -> None:
    class Other(ToyPipeline):
        name = "other_pipeline"

    with pytest.raises(pf.PlanError, match=r"\[one-runner\].*other_pipeline.*Keep one"):
        by_trainer("classification", 23, BATCH, plugins=[ToyPipeline(2), Other(2)])


def test_the_loop_knows_no_strategy() -> None:
    package = Path(pf.__file__ or "").parent
    strategies = r"\b(ddp|distributeddataparallel|fsdp|shard|pipeline|autocast|scaler|compile|tensor.parallel)"
    for file in ("trainer.py", "engine.py"):
        code = re.sub(r'""".*?"""|#.*', "", (package / file).read_text(), flags=re.DOTALL)
        flags = re.compile(r"^ {8}\w+: .* = None,$", re.MULTILINE)
        found = re.findall(strategies, flags.sub("", code), re.IGNORECASE)
        assert not found, f"{file} names {found}"
    assert len((package / "trainer.py").read_text().splitlines()) <= 400
