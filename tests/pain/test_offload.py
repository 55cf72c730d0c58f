"""What lives on the host where others are wrong: masters that clipping misses, copies that race with the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import paraflow as pf
from paraflow.parts import whole
from tests.pain.test_sharding import Slopes


def masters(plans: list[dict[str, Any]]) -> list[dict[str, list[float]]]:
    """The masters of half parameters after one step whose gradient, of norm 6, is clipped to 3."""
    results = []
    for plan in plans:
        model = Slopes(torch.bfloat16)
        trainer = pf.Trainer(max_steps=1, clip_norm=3.0, progress=False, cpu_offload="optimizer", **plan)
        trainer.fit(model, torch.full((8,), 1.0), batch_size=8)
        held = trainer.engine.state_dict()["optimizer"]["state"]
        results.append({name: whole(values["master_weight"]).tolist() for name, values in held.items()})
        for name, parameter in model.named_parameters():
            if name in held:
                assert whole(parameter).tolist() == pytest.approx(results[-1][name], rel=2**-8)
    return results


def test_masters_on_the_host_are_clipped(ranks: Any) -> None:
    """InternEvo#398: the gradients on the device were clipped, and the masters on the host moved by the others."""
    plans = [{"dp": 2}, {"fsdp": 2}, {"fsdp": 2, "apply_groups": 2}, {"dp": 2, "optimizer_implementation": "foreach"}]
    for results in ranks(2, masters, plans):
        for found in results:
            assert found["five"] == pytest.approx([-1.0] * 5, rel=1e-2)  # the gradient is bf16, the norm of it as well
            assert found["one"] == pytest.approx([-2.0], rel=1e-2)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]


class Settling(pf.Model):
    """The gradient is the weight plus one, so that a weight of 0 goes to -1 with the first step, and stays there."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(300, 1000) for _ in range(4))
        self.configure(optimizer="sgd", lr=1.0)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return sum(((part * part.detach()).sum() + part.sum() for part in self.parts), batch.sum() * 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("plan", [{}, {"apply_groups": 3}, {"apply_groups": "backward"}], ids=str)
def test_no_copy_is_read_before_it_is_there(device: str, plan: dict[str, Any]) -> None:
    """DeepSpeed#1219, #3097: copies to and from the host raced with the step; what is read too early is not exact."""
    model = Settling()
    trainer = pf.Trainer(max_steps=6, progress=False, device=device, cpu_offload="optimizer", **plan)
    trainer.fit(model, torch.zeros(12), batch_size=2)
    for part in model.parts:
        assert part.device.type == device
        assert torch.equal(part.detach().cpu(), torch.full((300, 1000), -1.0))
