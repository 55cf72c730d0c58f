"""Trainings under the check: a mistake in a callback is found, and a training without one is left alone."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import all_reduce as all_reduce_by_another_name

import paraflow as pf
from paraflow.debug import CollectiveCheck
from tests.debug.helpers import held, site_in, world
from tests.parity.runs import Measured, by_trainer
from tests.parity.tasks import CASES

site = partial(site_in, __file__)


class Announce(pf.Callback):
    """Announces what torch starts by itself, as the trainer does in debug mode."""

    def __init__(self) -> None:
        self.check: CollectiveCheck | None = None
        self.announced = 0

    def on_micro_batch_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self._say("forward of a micro-batch")

    def on_before_backward(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self._say("backward: gradients are averaged")

    def on_before_optimizer_step(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self._say("optimizer step")

    def _say(self, what: str) -> None:
        if self.check is not None:
            self.announced += 1
            self.check.announce(what)  # line: announced


class SaveOnMain(pf.Callback):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_after_optimizer_step(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        if trainer.is_main and trainer.step == 1:
            trainer.save(self.folder)  # line: save


class BarrierOnMain(pf.Callback):
    def on_checkpoint(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        if trainer.is_main and trainer.step == 2:
            dist.barrier()  # line: callback barrier


class EvaluateOnMain(pf.Callback):
    def on_step_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        if trainer.is_main and trainer.step == 1:
            trainer.evaluate(trainer.engine.module, CASES["classification"].data(6))  # line: evaluate


def fit_with(mistake: pf.Callback) -> str:
    case, announce = CASES["classification"], Announce()
    trainer = pf.Trainer(max_steps=4, progress=False, callbacks=[announce, mistake])
    try:
        with CollectiveCheck(world(), step=lambda: trainer.step) as announce.check:
            trainer.fit(case.model(), case.data(40), batch_size=10)
    except pf.ParaflowError as error:
        return str(error)
    return "nothing"


def test_saving_on_the_main_rank_only(ranks: Any, tmp_path: Path) -> None:
    (said,) = set(ranks(2, fit_with, SaveOnMain(str(tmp_path))))
    assert said.startswith("The ranks are at different steps: rank 0 is about to run all_gather(int64[1]) at ")
    assert f" at {site('save', 'on_after_optimizer_step')} (paraflow/" in said
    assert ' in step 1, and rank 1 has come to "forward of a micro-batch" at ' in said


def test_a_barrier_on_the_main_rank_only(ranks: Any) -> None:
    (said,) = set(ranks(2, fit_with, BarrierOnMain()))
    assert said.startswith(
        f"Step 2: rank 0 is about to run barrier() at {site('callback barrier', 'on_checkpoint')}, and rank 1 has come "
        f'to "forward of a micro-batch" at {site("announced", "_say")}. '
    )


def test_evaluating_on_the_main_rank_only(ranks: Any) -> None:
    (said,) = set(ranks(2, fit_with, EvaluateOnMain()))
    assert said.startswith("Step 1: rank 0 is about to run ")
    assert f" at {site('evaluate', 'on_step_begin')} (paraflow/" in said
    assert ', and rank 1 has come to "forward of a micro-batch" at ' in said


def everything(name: str, folder: str, **plan: Any) -> tuple[Measured, Measured, int, int]:
    """The same training without and under the check, with validation, metrics, checkpoints, evaluate and predict."""
    before, plain = held(), by_trainer(name, 23, 10, **plan)
    mesh, announce = world(), Announce()
    callbacks = [announce, pf.callbacks.Checkpoint(folder, every="2st", monitor="val_loss", mode="min", keep=2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with CollectiveCheck(mesh, step=lambda: 0, patience=20) as announce.check:
            assert dist.all_reduce is not before["all_reduce"]
            assert all_reduce_by_another_name is dist.all_reduce
            checked = _fit(name, callbacks, **plan)
            keys = mesh.store("debug/collectives").num_keys()
            for _ in range(20):
                mesh.barrier()
            more = mesh.store("debug/collectives").num_keys() - keys
    assert held() == before
    assert all_reduce_by_another_name is dist.all_reduce
    return plain, checked, announce.announced, more


def _fit(name: str, callbacks: list[pf.Callback], **plan: Any) -> Measured:
    case = CASES[name]
    model, data = case.model(), case.data(23)
    trainer = pf.Trainer(
        max_epochs=2, seed=5, progress=False, callbacks=callbacks, **{"clip_norm": float("inf"), **plan}
    )
    history = trainer.fit(model, data, data, batch_size=10)
    trainer.evaluate(model, data)
    trainer.predict(model, data)
    return Measured(
        parameters={key: value.clone() for key, value in trainer.engine.state_dict()["model"].items()},
        metrics=history.history,
    )


@pytest.mark.parametrize(
    ("name", "size", "plan", "announcements"),
    [  # two epochs of batches of 10, 10 and 3; the last has one micro-batch a rank at most
        ("classification", 2, {}, 2 * 3 * (1 + 1 + 1)),
        ("classification", 2, {"precision": "fp16", "comm_hook": "bf16"}, 2 * 3 * (1 + 1 + 1)),
        ("token means", 3, {"accumulate": 3}, 2 * (7 + 7 + 3)),
    ],
)
def test_trainings_are_left_alone(
    ranks: Any, tmp_path: Path, name: str, size: int, plan: dict[str, Any], announcements: int
) -> None:
    for plain, checked, announced, more in ranks(size, everything, name, str(tmp_path), **plan):
        assert checked.parameters.keys() == plain.parameters.keys()
        for key, value in plain.parameters.items():
            assert torch.equal(checked.parameters[key], value)
        assert checked.metrics == plain.metrics
        assert announced == announcements
        assert more < 3, "the store grows"  # by one a rank while another has not yet read it, and not by 20 barriers
