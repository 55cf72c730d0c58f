"""Sharding with split layers, and under a pipeline: the same training as in one process."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

import paraflow as pf
from paraflow.data import Batch
from paraflow.engine import Engine
from paraflow.loss import StepOutput, read_step
from paraflow.parts import local
from paraflow.plugins import Plugin
from paraflow.step import release_graph
from tests.allocations import peak_of
from tests.parity.runs import Measured, assert_same, by_hand, by_trainer, whole_parameters
from tests.parity.test_pipeline import BATCH, COUNT  # and its cases


class Ahead(Plugin):
    """Runs forwards ahead of the first backward, as the stages of a pipeline do."""

    name = "ahead"

    def __init__(self, ahead: int, *, reshard: bool) -> None:
        self.ahead, self.reshard = ahead, reshard

    def run_micro_batches(self, engine: Engine, batch: Batch) -> list[StepOutput]:
        count, waiting, outputs = len(batch.micro_batches), deque[torch.Tensor](), []
        for index, micro in enumerate(batch.micro_batches):
            with engine.around(index, count, "forward"):
                outputs.append(read_step(engine.forward(micro.data), micro.samples))
                waiting.append(engine.weigh(outputs[-1], batch))
            if index >= self.ahead:
                self._backward(engine, waiting, index - self.ahead, count)
        for index in range(count - len(waiting), count):
            self._backward(engine, waiting, index, count)
        for output in outputs:
            release_graph(output)
        return outputs

    def _backward(self, engine: Engine, waiting: deque[torch.Tensor], index: int, count: int) -> None:
        with engine.around(index, count, "backward"):
            waiting.popleft().backward()


AHEAD: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"ahead": 3, "reshard": False}, {"zero": 3, "accumulate": 3, "clip_norm": 0.2}),
    ({"ahead": 3, "reshard": True}, {"zero": 3, "accumulate": 3, "clip_norm": 0.2}),
    ({"ahead": 1, "reshard": True}, {"zero": 3, "accumulate": 3, "clip_norm": 0.2}),
    ({"ahead": 1, "reshard": False}, {"zero": 1, "accumulate": 3, "clip_norm": 0.2}),
    ({"ahead": 2, "reshard": False}, {"zero": 2, "accumulate": 3, "clip_norm": 0.2}),
]


def sharded_with_forwards_ahead() -> list[Measured]:
    return [
        by_trainer("classification", COUNT, BATCH, plugins=[Ahead(**runner)], fsdp=2, **plan) for runner, plan in AHEAD
    ]


def test_forwards_may_run_ahead_of_backwards(ranks: Any) -> None:
    reference = by_hand("classification", COUNT, BATCH, clip_norm=0.2)
    for results in ranks(2, sharded_with_forwards_ahead, timeout=120):
        for measured in results:
            assert_same(measured, reference)


Asked = list[tuple[str, dict[str, Any]]]  # cases, each with its plan

PLANS: Asked = [
    ("classification", {"fsdp": 2, "tp": 2, "plan": {"body.0": "colwise", "body.2": "rowwise"}, "accumulate": 3}),
    ("causal", {"fsdp": 2, "tp": 2, "zero": 1, "apply_groups": 2, "activation_checkpointing": "selective"}),
    ("masked", {"pp": 2, "fsdp": 2, "zero": 3, "schedule": "zbv", "chunks": 2, "accumulate": 3}),
    ("causal", {"pp": 2, "fsdp": 2, "zero": 3, "reshard": True, "accumulate": 2, "activation_checkpointing": "full"}),
    ("causal", {"pp": 2, "tp": 2, "accumulate": 2, "activation_checkpointing": "full", "cpu_offload": "optimizer"}),
]
MORE: Asked = [
    ("classification", {"fsdp": 2, "tp": 2, "zero": 3, "cpu_offload": "optimizer", "apply_groups": 2}),
    ("deep", {"pp": 2, "fsdp": 2, "zero": 2, "schedule": "interleaved", "chunks": 2, "reshard": True, "accumulate": 3}),
    ("deep", {"pp": 2, "fsdp": 2, "zero": 3, "schedule": "gpipe", "accumulate": 3}),
    ("deep", {"pp": 2, "fsdp": 2, "zero": 1, "schedule": "interleaved_zero_bubble", "chunks": 2, "accumulate": 3}),
    ("masked", {"pp": 2, "fsdp": 2, "zero": 2, "cpu_offload": "optimizer", "apply_groups": 3, "accumulate": 2}),
    ("causal", {"pp": 2, "fsdp": 2, "cpu_offload": "params", "accumulate": 2}),
]


def trained_alike(asked: Asked) -> list[Measured]:
    return [under(name, **plan) for name, plan in asked]


def under(name: str, **plan: Any) -> Measured:
    """Trains a case; what the plugins of stages and of split layers are told stands among the plan's fields."""
    stages = {key: plan.pop(key) for key in ("schedule", "chunks", "reshard") if key in plan}
    layers = {key: plan.pop(key) for key in ("plan",) if key in plan}
    plugins: list[Plugin] = [pf.plugins.Pipeline(plan.pop("pp"), **stages)] if "pp" in plan else []
    plugins += [pf.plugins.TensorParallel(plan.pop("tp"), **layers)] if "tp" in plan else []
    return by_trainer(name, COUNT, BATCH, plugins=plugins, clip_norm=0.2, **plan)


@pytest.mark.parametrize("asked", [PLANS, pytest.param(MORE, marks=pytest.mark.slow)], ids=["some", "more"])
def test_split_layers_and_stages_are_sharded_too(ranks: Any, asked: Asked) -> None:
    references = {name: by_trainer(name, COUNT, BATCH, clip_norm=0.2) for name, _ in asked}
    for results in ranks(4, trained_alike, asked, timeout=240):
        for (name, plan), measured in zip(asked, results, strict=True):
            try:
                assert_same(measured, references[name])
            except AssertionError as error:
                raise AssertionError(f"{name} {plan}: {error}") from error


HALVES: Asked = [
    ("causal", {"pp": 2, "dp": 2, "comm_hook": "bf16", "accumulate": 2}),
    ("causal", {"pp": 2, "fsdp": 2, "comm_hook": "bf16", "accumulate": 2}),
    ("causal", {"tp": 2, "dp": 2, "comm_hook": "fp16"}),
]


def test_gradients_are_sent_in_halves_after_backward_too(ranks: Any) -> None:
    reference = by_trainer("causal", COUNT, BATCH, clip_norm=0.2)
    for results in ranks(4, trained_alike, HALVES, timeout=120):
        for measured in results:
            torch.testing.assert_close(measured.losses, reference.losses, rtol=2e-2, atol=1e-3)
            torch.testing.assert_close(measured.norms, reference.norms, rtol=5e-2, atol=1e-3)
            assert measured.norms != pytest.approx(reference.norms, rel=1e-6)


class Wide(nn.Module):
    """Eight weights of a mebibyte."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Wide() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 512), nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return result


def begun_without_memory(plans: list[dict[str, Any]]) -> list[tuple[dict[str, float], float, int, int]]:
    """Returns by plan what the model begins with, what is drawn next, the bytes of this rank's part, and the peak."""
    found = []
    for plan in plans:
        pf.seed(7)
        with pf.deferred_init():
            net = Wide()
        drawn = float(torch.rand(()))
        trainer = pf.Trainer(progress=False, **plan)
        peak = peak_of(lambda net=net, trainer=trainer: trainer.predict(net, torch.ones(8, 512), batch_size=8))
        values = {name: float(value.double().sum()) for name, value in whole_parameters(trainer).items()}
        found.append((values, drawn, sum(local(parameter).nbytes for parameter in net.parameters()), peak))
    return found


def test_what_other_ranks_hold_never_has_memory(ranks: Any) -> None:
    ((values, drawn, whole, peak),) = begun_without_memory([{}])
    assert peak >= whole > 8 * 2**20
    for results in ranks(4, begun_without_memory, [{"pp": 2, "fsdp": 2}, {"fsdp": 2, "tp": 2}, {"pp": 2, "tp": 2}]):
        for found, then, held, _ in results:
            assert found == values
            assert then == drawn
            assert held < 0.26 * whole
        _, _, held, most = results[-1]
        assert most - held < 2**20  # nothing is gathered there: one weight while it is made
