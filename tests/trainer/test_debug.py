"""``Trainer(debug=True)``: a mistake on one rank is told with its place, and a right training is left alone."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import paraflow as pf
from tests.callbacks.contract import X, Y, net
from tests.debug.helpers import held, site_in

site = partial(site_in, __file__)


def fit(folder: str, *callbacks: pf.Callback, **options: Any) -> pf.Trainer:
    saving = pf.callbacks.Checkpoint(folder, 2, monitor="val_loss")
    trainer = pf.Trainer(max_epochs=2, progress=False, callbacks=[*callbacks, saving], **options)
    trainer.fit(net(), (X, Y), (X, Y), batch_size=6)
    return trainer


def both_ways(folder: str, debug: bool | int, **plan: Any) -> tuple[bool, bool, bool]:
    """Whether weights and history are the same with and without, and torch's functions are back in their place."""
    before = held()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain, checked = fit(f"{folder}/plain", **plan), fit(f"{folder}/debug", debug=debug, **plan)
    states = [trainer.engine.state_dict() for trainer in (plain, checked)]
    names = list(states[0]["model"])
    same = all(torch.equal(states[0]["model"][name], states[1]["model"][name]) for name in names)
    return same, plain.history.history == checked.history.history, held() == before


@pytest.mark.parametrize(
    ("size", "debug", "plan"), [(1, True, {}), (2, True, {}), (2, 1, {"precision": "bf16", "clip_norm": 1.0})]
)
def test_a_right_training_is_the_same_to_the_bit(ranks: Any, tmp_path: Path, size: int, debug: Any, plan: Any) -> None:
    assert ranks(size, both_ways, str(tmp_path), debug, **plan) == [(True, True, True)] * size


class SaveOnMain(pf.Callback):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_after_optimizer_step(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        if trainer.is_main and trainer.step == 2:
            trainer.save(self.folder)  # line: save


class Change(pf.Callback):
    """Changes a parameter on rank 1 after step 3."""

    def on_after_optimizer_step(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        if trainer.step + 1 == 3 and pf.rank() == 1:
            with torch.no_grad():
                trainer.engine.module[4].bias[1] += 1e-3


def told(folder: str, mistake: pf.Callback, debug: bool | int) -> str:
    before = held()
    with pytest.raises(pf.ParaflowError) as caught:
        fit(folder, mistake, debug=debug)
    assert held() == before
    return str(caught.value)


def test_saving_on_the_main_rank_only_is_told_with_both_places(ranks: Any, tmp_path: Path) -> None:
    for said in ranks(2, told, str(tmp_path), SaveOnMain(str(tmp_path / "mine")), True, timeout=30):
        assert f" at {site('save', 'on_after_optimizer_step')} (paraflow/" in said
        assert "rank 0 is about to run " in said
        assert "rank 1 " in said
        assert said.count(" at ") >= 2
        assert "`if trainer.is_main:`" in said
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(("debug", "step"), [(1, 3), (2, 4), (4, 4), (5, 5), (True, 8)])
def test_a_parameter_that_differs_is_found_within_so_many_steps_and_named(
    ranks: Any, tmp_path: Path, debug: bool | int, step: int
) -> None:
    """The run has eight steps, and its last is always compared."""
    for said in ranks(2, told, str(tmp_path), Change(), debug, timeout=30):
        assert said.startswith(f"Step {step}: ranks that must hold the same parameters do not. ")
        assert "4.bias (rank 1 differs from rank 0)" in said
    saved = [int(name.removeprefix("step-")) for name in os.listdir(tmp_path)]
    assert all(number < step for number in saved), "parameters are compared before they are saved"


def test_without_it_nothing_is_added() -> None:
    plain, checked = pf.Trainer(progress=False), pf.Trainer(progress=False, debug=True)
    assert plain.callbacks == ()
    assert [type(callback).__name__ for callback in checked.callbacks] == ["DebugMode"]
