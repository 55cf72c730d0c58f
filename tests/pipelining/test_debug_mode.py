"""The debug mode under a pipeline, whose ranks are never at one place of the program."""

from __future__ import annotations

import torch
from torch import nn

import paraflow as pf
from tests.pool import Pool


def train() -> list[float]:
    torch.manual_seed(1)
    model = pf.configure(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), optimizer="sgd", lr=0.1, loss="mse")
    plugins = [pf.plugins.Pipeline(2)]
    trainer = pf.Trainer(max_epochs=1, plugins=plugins, accumulate=2, debug=1, progress=False)
    return trainer.fit(model, (torch.randn(12, 4), torch.randn(12, 4)), batch_size=4)["loss"]


def test_it_does_not_wait_for_ranks_that_wait_for_messages(ranks: Pool) -> None:
    first, second = ranks(2, train, timeout=30)
    assert first == second
