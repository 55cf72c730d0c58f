"""Flags, plugins and files say the same things of one plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import paraflow as pf

DATA = (torch.randn(8, 3), torch.zeros(8).long())


def net() -> torch.nn.Module:
    return pf.configure(torch.nn.Linear(3, 2), loss="cross_entropy")


def planned(**options: Any) -> pf.Plan:
    trainer = pf.Trainer(progress=False, **options)
    trainer.fit(net(), DATA)
    return trainer.plan


def test_three_ways_to_say_it(tmp_path: Path) -> None:
    by_flags = planned(accumulate=2, precision="bf16", clip_norm=1.0)
    file = tmp_path / "plan.yaml"
    by_flags.to_yaml(file)
    assert planned(plan=str(file)) == by_flags
    assert planned(plan=by_flags) == by_flags
    plugins = [pf.plugins.GradientAccumulation(2), pf.plugins.Precision("bf16"), pf.plugins.Clipping(1.0)]
    assert planned(plugins=plugins) == by_flags


def test_a_file_and_a_flag_may_add_to_each_other_and_not_differ(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("accumulate: 2\n")
    assert planned(plan=file, precision="bf16") == pf.Plan(accumulate=2, precision="bf16")
    with pytest.raises(pf.PlanError, match=r"accumulate is 4 by the Trainer's arguments and 2 by the plan"):
        planned(plan=file, accumulate=4)


def test_options_reach_their_plugin(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("precision: fp16\noptions:\n  precision:\n    initial_scale: 8.0\n")
    trainer = pf.Trainer(plan=file, progress=False)
    trainer.fit(net(), DATA)
    assert trainer.engine.state_dict()["plugins"]["precision"]["scale"] == 8.0
    file.write_text("precision: fp16\noptions:\n  precision:\n    intial_scale: 8.0\n")
    with pytest.raises(pf.PlanError, match="intial_scale"):
        planned(plan=file)


def test_deterministic_runs_repeat() -> None:
    def train() -> torch.Tensor:
        pf.seed(1)
        model = pf.configure(torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)))
        pf.configure(model, loss="cross_entropy")
        pf.Trainer(max_epochs=2, deterministic=True, progress=False, seed=7).fit(model, DATA, batch_size=3)
        return model[0].weight.detach()

    before = torch.are_deterministic_algorithms_enabled()
    try:
        assert torch.equal(train(), train())
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(before)


def test_a_second_fit_begins_anew_with_the_weights_as_they_are() -> None:
    model = net()
    trainer = pf.Trainer(max_epochs=2, progress=False)
    first = trainer.fit(model, DATA, batch_size=4)
    second = trainer.fit(model, DATA, batch_size=4)
    assert trainer.step == 4
    assert len(second) == 2
    assert second["loss"][0] < first["loss"][0]
    assert second is trainer.history


def test_what_auto_chose_for_one_batch_does_not_bind_the_next(capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    trainer = pf.Trainer(auto="O1")
    trainer.evaluate(model, DATA)
    trainer.fit(model, DATA, batch_size=8)
    printed = capsys.readouterr().out
    assert [field for field in ("dp", "precision", "accumulate") if f"auto: {field} = " not in printed] == []
    trainer.engine.plan = trainer.engine.plan.with_fields(accumulate=3)  # as if it had been chosen for a large batch
    trainer.fit(model, DATA, batch_size=2)
    assert trainer.plan.accumulate == 1
