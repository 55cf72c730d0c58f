"""Activation bytes are those that a count by hand gives, and measuring leaves no trace."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paraflow.profiler import activation_bytes


def test_bytes_of_a_small_network_by_hand() -> None:
    net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    batch = torch.randn(7, 10)
    # The first layer keeps its input; the ReLU's output is kept once, though the second layer keeps it as well.
    assert activation_bytes(net, lambda x: net(x).sum(), batch) == 7 * (10 + 20) * 4


def test_parameters_are_not_counted() -> None:
    net = nn.Linear(1000, 1000)
    assert activation_bytes(net, lambda x: net(x).sum(), torch.randn(1, 1000)) == 4000


def test_measuring_leaves_no_trace() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).eval()
    state = {name: value.clone() for name, value in net.state_dict().items()}
    random = torch.get_rng_state()
    seen: list[bool] = []

    def step(x: Any) -> torch.Tensor:
        seen.append(net.training)
        return net(x).sum()

    assert activation_bytes(net, step, torch.randn(5, 3, generator=torch.Generator())) > 0
    assert seen == [True]
    assert not net.training
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
