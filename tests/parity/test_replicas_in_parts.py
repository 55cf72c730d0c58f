"""Replicas that are spread over ranks themselves do what whole ones do: with statistics, and with unused parameters."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paraflow as pf
from paraflow.compatibility.table import judge
from tests.parity.runs import whole_parameters

MORE = {"max_steps": 3, "seed": 1, "progress": False}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.norm(self.layer(x)))


class Statistics(pf.Model):
    """Layers that keep running statistics on each stage."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


class Looking(pf.Callback):
    """Notes the averages that are on their way when gradients can be looked at."""

    def __init__(self) -> None:
        self.begun: list[int] = []

    def on_after_backward(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        (plugin,) = [plugin for plugin in trainer.engine.plugins if isinstance(plugin, pf.plugins.DataParallel)]
        averaging = plugin._averaging
        self.begun.append(0 if averaging is None else averaging.begun)


def frozen(plan: dict[str, Any], **arguments: Any) -> tuple[dict[str, torch.Tensor], list[int]]:
    """A first half that is not trained, of replicas that were seeded apart."""
    model = Statistics(seed=int(os.environ["RANK"]) % 2).configure(optimizer="sgd", lr=0.1, loss="cross_entropy")
    model.blocks[:2].requires_grad_(False)
    looking = Looking()
    trainer = pf.Trainer(**MORE, callbacks=[looking], **plan, **arguments)
    trainer.fit(model, data(), batch_size=24)
    loss = trainer.evaluate(model, data(), batch_size=24)["loss"]
    return {**whole_parameters(trainer), "loss": torch.tensor(loss)}, looking.begun


def frozen_stage(plan: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[int]]:
    return frozen(plan, plugins=[pf.plugins.Pipeline(2, stages=["blocks.2"])])


def test_a_stage_that_is_not_trained_is_alike_on_all_replicas(ranks: Any) -> None:
    expected, _ = ranks(2, frozen, {"dp": 2, "accumulate": 2})[0]
    for found, begun in ranks(4, frozen_stage, {"dp": 2, "accumulate": 2}):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert begun == [0] * 6, "nothing is on its way while a callback looks"


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


class Unused(pf.Model):
    """Has layers that no step uses, of which some can be split."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(mlp(), mlp())
        self.unused, self.lone = mlp(), nn.Linear(16, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(1)
    return torch.randn(48, 16, generator=drawn), torch.randint(5, (48,), generator=drawn)


def with_statistics(plan: dict[str, Any], folder: str, resumes: bool = False) -> dict[str, Any]:
    """The whole model after three steps, or after two and a resumed third, and its loss in evaluation."""
    result: dict[str, Any] = {}
    for steps in (2, 3) if resumes else (3,):
        model = Statistics().configure(optimizer="sgd", lr=0.1, loss="cross_entropy")
        callbacks = [pf.callbacks.Checkpoint(folder, every=1)] if resumes else []
        trainer = pf.Trainer(**{**MORE, "max_steps": steps}, callbacks=callbacks, **plan)
        trainer.fit(model, data(), batch_size=24, resume=folder if resumes and steps == 3 else None)
        loss = trainer.evaluate(model, data(), batch_size=24)["loss"]
        result = {**whole_parameters(trainer), "loss": torch.tensor(loss)}
    return result


def staged(folder: str) -> list[dict[str, Any]]:
    plan, sharded = {"pp": 2, "dp": 2, "accumulate": 2}, {"pp": 2, "fsdp": 2, "accumulate": 2}
    resumed = with_statistics(plan, folder, resumes=True)
    return [with_statistics(plan, folder), with_statistics(sharded, folder), resumed]


def test_statistics_are_those_of_whole_replicas_and_are_resumed(ranks: Any, tmp_path: Path) -> None:
    expected = ranks(2, with_statistics, {"dp": 2, "accumulate": 2}, "")[0]
    for through, sharded, resumed in ranks(4, staged, str(tmp_path)):
        torch.testing.assert_close(through, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sharded, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(resumed, through, rtol=0, atol=0)


def with_unused(plan: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = Unused().configure(optimizer="adamw", lr=0.05, weight_decay=0.5, loss="cross_entropy")
    trainer = pf.Trainer(**MORE, **plan)
    trainer.fit(model, data(), batch_size=24)
    return whole_parameters(trainer)


PARTS = ({"pp": 2, "dp": 2, "accumulate": 2}, {"tp": 2, "dp": 2})


def unused() -> list[dict[str, torch.Tensor]]:
    options = {"data_parallel": {"find_unused_parameters": True}}
    return [with_unused({"plan": pf.Plan(**plan, options=options)}) for plan in PARTS]


def test_what_no_replica_uses_is_left_as_it_is(ranks: Any) -> None:
    expected = with_unused({})
    assert torch.equal(expected["lone.weight"], Unused().lone.weight)
    for found in ranks(4, unused):
        for parameters in found:
            torch.testing.assert_close(parameters, expected)


def unexpectedly_unused() -> list[str]:
    said = []
    for plan in PARTS:
        with pytest.raises(pf.ModelError) as error:
            with_unused(plan)
        said.append(str(error.value))
    return said


def test_what_is_unused_is_told_on_every_rank(ranks: Any) -> None:
    for said in ranks(4, unexpectedly_unused):
        assert all("had no part in the loss of the first step: unused.0.weight" in text for text in said)


def test_an_option_that_does_nothing_there_is_refused() -> None:
    options = {"data_parallel": {"static_graph": True}}
    assert [rule.id for rule in judge({"pp": 2, "dp": 2, "options": options}).broken] == ["data-parallel-static-graph"]
    assert judge({"tp": 2, "dp": 2, "options": options}).legal
