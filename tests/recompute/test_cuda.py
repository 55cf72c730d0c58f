"""On a CUDA device: the same bits, with copies to the host that run beside the computation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.recompute.models import Language
from tests.recompute.test_treatments import treated

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def trained(model: nn.Module, kind: str, batch: torch.Tensor) -> list[torch.Tensor]:
    blocks, seen = treated(model, kind, min_bytes=1024), []
    torch.manual_seed(0)
    for _ in range(3):
        model.zero_grad()
        with blocks, torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(batch)
        loss.backward()
        seen += [loss.detach(), torch.rand(1, device="cuda")] + [p.grad.clone() for p in model.parameters()]
    return seen


@pytest.mark.parametrize("kind", ["full", "selective", "offload", "operations"])
def test_training_is_the_same_bit_by_bit(kind: str) -> None:
    torch.manual_seed(1)
    model = Language().cuda()
    batch = torch.randn(512, 6, device="cuda")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        expected = trained(copy.deepcopy(model), "keep", batch)
        assert all(torch.equal(a, b) for a, b in zip(expected, trained(model, kind, batch), strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(12)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def test_less_is_on_the_device() -> None:
    model, batch = Wide().cuda(), torch.randn(8192, 1024, device="cuda")

    def peak(kind: str) -> int:
        blocks = treated(model, kind, min_bytes=1024)
        for _ in range(2):
            model.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            with blocks:
                loss = model(batch)
            loss.backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - sum(p.nbytes for p in model.parameters())

    everything, full, offload = peak("keep"), peak("full"), peak("offload")
    assert full < everything / 2
    assert offload < everything / 2
