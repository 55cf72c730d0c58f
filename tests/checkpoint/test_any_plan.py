"""Saved under any plan, loaded under any other: parameters, the optimizer's state, and what training makes of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paraflow as pf
from paraflow.checkpoint import load_model
from paraflow.parts import map_values, whole

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (64,), generator=torch.Generator().manual_seed(2))
SAVED, STEPS = 3, 5


class Net(nn.Module):
    """Tied weights, a layer of three rows (four ranks leave one of them none), and statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 12, bias=False), nn.Linear(12, 12)
        self.second.weight = self.first.weight
        self.leave, self.scale = nn.Linear(12, 3), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(torch.tanh(self.enter(x)))
        logits: torch.Tensor = self.leave(torch.tanh(self.second(torch.tanh(x)))) * self.scale
        return logits


def net() -> nn.Module:
    return pf.configure(Net(), optimizer="adamw", lr=1e-2, loss="cross_entropy", schedule="cosine")


def gathered(value: Any) -> Any:
    return map_values(value, lambda one: whole(one).clone() if isinstance(one, torch.Tensor) else one)


class Look(pf.Callback):
    """Notes the state at a run's beginning and end."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def _look(self, trainer: pf.Trainer) -> None:
        state = trainer.engine.state_dict()
        averages = [c.state_dict()["averages"] for c in trainer.callbacks if isinstance(c, pf.callbacks.EMA)]
        named = {"model": state["model"], "moments": state["optimizer"]["state"], "averages": averages}
        self.seen.append(copy.deepcopy(gathered(named)))

    def on_train_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self._look(trainer)

    def on_train_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self._look(trainer)


def fit(folder: str, steps: int, resume: bool, background: bool = False, **plan: Any) -> list[dict[str, Any]]:
    """Trains and saves, and returns the state at the beginning and the end, whole."""
    look = Look()
    saving = pf.callbacks.Checkpoint(folder, 1 if background else "1ep", background=background)
    stop = pf.callbacks.LambdaCallback(on_step_end=lambda trainer, logs: trainer.stop() if trainer.step == steps else 0)
    callbacks = [pf.callbacks.EMA(0.9), look, stop, *([saving] if not resume else [])]
    trainer = pf.Trainer(max_steps=STEPS, progress=False, callbacks=callbacks, clip_norm=1.0, seed=3, **plan)
    trainer.fit(net(), (X, Y), batch_size=8, resume=folder if resume else None)
    return look.seen


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp 2": (2, {"dp": 2}),
    "fsdp 2": (2, {"fsdp": 2}),
    "fsdp 4": (4, {"fsdp": 4}),
    "dp 2 fsdp 2": (4, {"dp": 2, "fsdp": 2}),
    "fsdp 2, optimizer on the host": (2, {"fsdp": 2, "cpu_offload": "optimizer"}),
}


def same(mine: Any, theirs: Any, rtol: float = 1e-5) -> None:
    torch.testing.assert_close(mine, theirs, rtol=rtol, atol=0.0 if rtol == 0 else 1e-6)


@pytest.fixture(scope="module")
def checkpoints(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """By plan: a checkpoint, and the state that is in it."""
    home = tmp_path_factory.mktemp("checkpoints")
    made = {}
    for number, (name, (size, plan)) in enumerate(PLANS.items()):
        folder = home / str(number)
        made[name] = folder, ranks(size, fit, str(folder), SAVED, False, **plan)[0][-1]
    return made


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The state of a run in one process that was not saved."""
    return fit(str(tmp_path_factory.mktemp("whole")), STEPS, False)[-1]


NAMES = list(PLANS)
# Each is saved once and loaded once by another; how each goes on with its own is told to the bit below.
ACROSS = {*zip(NAMES, NAMES[3:] + NAMES[:3], strict=True), ("one", "one"), ("fsdp 2", "fsdp 4"), ("fsdp 4", "fsdp 2")}
PAIRS = [
    pytest.param(save, load, marks=[] if (save, load) in ACROSS else [pytest.mark.slow])
    for save in NAMES
    for load in NAMES
]


@pytest.mark.parametrize(("save", "load"), PAIRS)
def test_any_plan_loads_what_any_plan_has_saved(
    ranks: Any, checkpoints: Any, never_stopped: dict[str, Any], save: str, load: str
) -> None:
    folder, before = checkpoints[save]
    size, plan = PLANS[load]
    for begun, ended in ranks(size, fit, str(folder), STEPS, True, **plan):
        begun["averages"], expected = [], {**before, "averages": []}  # they begin with the callback, beside this one
        same(begun, expected, rtol=0)
        same(ended, never_stopped)


@pytest.mark.parametrize("name", PLANS)
def test_one_process_without_a_group_takes_the_weights_of_any_checkpoint(checkpoints: Any, name: str) -> None:
    folder, before = checkpoints[name]
    model, averaged = net(), net()
    load_model(model, folder)
    pf.callbacks.EMA.load(averaged, folder)
    same(dict(model.state_dict()), before["model"], rtol=0)
    same(dict(averaged.state_dict()), before["averages"][0], rtol=0)


@pytest.mark.parametrize("name", ["fsdp 2", "dp 2 fsdp 2", "fsdp 2, optimizer on the host"])
def test_resuming_under_the_same_plan_is_equal_to_the_bit(ranks: Any, tmp_path: Path, name: str) -> None:
    size, plan = PLANS[name]
    expected = ranks(size, fit, str(tmp_path / "whole"), STEPS, False, **plan)[0][-1]
    ranks(size, fit, str(tmp_path / "parts"), SAVED, False, background=True, **plan)
    for _, ended in ranks(size, fit, str(tmp_path / "parts"), STEPS, True, **plan):
        same(ended, expected, rtol=0)


def dry(folder: str, **plan: Any) -> list[str]:
    """A dry run with what keeps weights; everything is as before, and what is restored is what was saved."""
    callbacks = [
        pf.callbacks.EMA(0.9, swap_at_end=False),
        pf.callbacks.EarlyStopping("val_loss", patience=9, restore_best=True),
        pf.callbacks.Checkpoint(folder),
    ]
    model = net()
    trainer = pf.Trainer(max_steps=4, progress=False, dry_run=True, callbacks=callbacks, **plan)
    trainer.fit(model, (X, Y), (X, Y), batch_size=8)
    now, fresh = gathered(trainer.engine.model_state()), net().state_dict()
    return [name for name in fresh if not torch.equal(now[name], fresh[name])]


@pytest.mark.parametrize("name", ["fsdp 2", "dp 2 fsdp 2"])
def test_a_dry_run_compares_each_ranks_parts(ranks: Any, tmp_path: Path, name: str) -> None:
    size, plan = PLANS[name]
    assert ranks(size, dry, str(tmp_path / "runs"), **plan) == [[]] * size


def best_of(folder: str, resume: bool, **plan: Any) -> dict[str, Any]:
    """The best weights of a run that gets worse, put back at its end, after a resume that has them on disk."""
    stopping = pf.callbacks.EarlyStopping("val_loss", patience=9, restore_best=True)
    saving = [] if resume else [pf.callbacks.Checkpoint(folder, 1)]
    model = net()
    trainer = pf.Trainer(
        max_steps=4 if resume else 2, val_every=1, progress=False, callbacks=[Worse(resume), stopping, *saving], **plan
    )
    trainer.fit(model, (X, Y), (X, Y), batch_size=8, resume=folder if resume else None)
    assert stopping.best_step == 1
    state: dict[str, Any] = gathered(trainer.engine.model_state())
    return state


class Worse(pf.Callback):
    """Validation is better the sooner it is."""

    def __init__(self, resumed: bool) -> None:
        self.count = 0

    def on_validation_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        logs["val_loss"] = float(trainer.step)


def test_the_best_weights_come_back_under_another_plan(ranks: Any, tmp_path: Path) -> None:
    best = ranks(2, best_of, str(tmp_path), False, fsdp=2)[0]
    for size, plan in (PLANS["fsdp 2"], PLANS["one"]):
        for back in ranks(size, best_of, str(tmp_path), True, **plan):
            same(back, best, rtol=0)
