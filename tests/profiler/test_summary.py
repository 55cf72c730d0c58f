"""What is counted by module is what a count by hand gives, and counting leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from paraflow.profiler import activation_bytes
from paraflow.profiler.summary import ModuleRow, summarise

ROWS = 7


def by_path(rows: list[ModuleRow]) -> dict[str, ModuleRow]:
    return {row.path: row for row in rows}


def test_layers_by_hand() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 4 * 4, 5)
    )
    x = torch.randn(ROWS, 3, 4, 4)
    rows = by_path(summarise(net, lambda: net(x).sum()))
    assert [row.output_shape for row in rows.values()] == [
        (ROWS, 5),
        *[(ROWS, 8, 4, 4)] * 3,
        (ROWS, 128),
        (ROWS, 5),
    ]
    assert [rows[str(n)].parameters for n in range(5)] == [8 * 3 * 9 + 8, 16, 0, 0, 128 * 5 + 5]
    assert [rows[str(n)].flops for n in range(5)] == [2 * ROWS * 8 * 16 * 27, 0, 0, 0, 2 * ROWS * 128 * 5]
    image = ROWS * 8 * 16 * 4
    # The convolution keeps its input; batch norm its input, and the mean and inverse deviation of each channel; the
    # ReLU its output, which the linear layer keeps as well, and is counted where it was kept first.
    assert [rows[str(n)].activation_bytes for n in range(5)] == [ROWS * 3 * 16 * 4, image + 2 * 8 * 4, image, 0, 0]
    whole = rows[""]
    for name in ("parameters", "flops", "activation_bytes"):
        assert getattr(whole, name) == sum(getattr(rows[str(n)], name) for n in range(5))


def test_attention_by_hand() -> None:
    batch, heads, length, width = 2, 3, 5, 4

    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.scaled_dot_product_attention(x, x, x)

    net = nn.Sequential(nn.Linear(width, width, bias=False), Attention())
    x = torch.randn(batch, heads, length, width)
    rows = by_path(summarise(net, lambda: net(x).sum()))
    assert rows["0"].flops == 2 * batch * heads * length * width * width
    assert rows["1"].flops == 2 * (2 * batch * heads * length * length * width)


class Shared(nn.Module):
    """Runs one layer twice, ties its output to its embedding, and calls a part's child from outside the part."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 11)
        self.head.weight = self.embedding.weight
        self.layers[1].requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        h = self.embedding(x)
        for layer in (self.layers[0], self.layers[0], self.layers[1]):
            h = layer(h)
        return {"logits": self.head(h)}


def test_what_is_shared_is_counted_once() -> None:
    net = Shared()
    rows = by_path(summarise(net, lambda: net(torch.zeros(ROWS, dtype=torch.int64))))
    assert rows[""].parameters == sum(parameter.numel() for parameter in net.parameters()) == 44 + 20 + 20 + 11 + 6
    assert (rows["head"].trainable, rows["head"].shared) == (11, 44)
    assert (rows[""].trainable, rows[""].frozen) == (81, 20)
    assert (rows["layers"].trainable, rows["layers"].frozen) == (20, 20)
    once = 2 * ROWS * 4 * 4
    assert [rows[path].flops for path in ("layers.0", "layers.1", "layers")] == [2 * once, once, 3 * once]
    assert rows["layers"].output_shape is None, "nobody called the list itself"
    assert rows["head"].output_shape == rows[""].output_shape == (ROWS, 11)
    assert (rows["unused"].flops, rows["unused"].output_shape) == (0, None)


def test_depth_leaves_rows_out_and_nothing_in_them() -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 4))), nn.Linear(4, 2))
    x = torch.randn(ROWS, 3)
    every = by_path(summarise(net, lambda: net(x).sum()))
    for depth, paths in ((0, [""]), (1, ["", "0", "1"]), (2, ["", "0", "0.0", "0.1", "1"])):
        rows = summarise(net, lambda: net(x).sum(), depth=depth)
        assert [row.path for row in rows] == paths
        assert rows == [every[path] for path in paths]
    assert every["0"].flops == 2 * ROWS * 3 * (3 + 4)


def test_the_whole_keeps_what_the_other_measurement_says() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 3))
    x = torch.randn(ROWS, 6)
    rows = summarise(net, lambda: functional.cross_entropy(net(x), torch.zeros(ROWS, dtype=torch.int64)))
    other = activation_bytes(net, lambda x: functional.cross_entropy(net(x), torch.zeros(ROWS, dtype=torch.int64)), x)
    assert rows[0].activation_bytes == other
    assert sum(row.activation_bytes or 0 for row in rows[1:]) < other, "the loss keeps something as well"


def test_autocast_halves_what_is_kept() -> None:
    net = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    x = torch.randn(100, 8)
    plain = by_path(summarise(net, lambda: net(x)))
    half = by_path(summarise(net, lambda: net(x), context=torch.autocast("cpu", dtype=torch.bfloat16)))
    assert plain["1"].activation_bytes == 100 * 8 * 4
    # Its input in half, and its weight in half, which is another tensor than the parameter.
    assert half["1"].activation_bytes == 100 * 8 * 2 + 8 * 8 * 2
    assert half["1"].flops == plain["1"].flops


def test_without_a_forward_parameters_are_counted_by_the_shapes_that_are_said() -> None:
    net = nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 2))
    rows = summarise(net, shapes={"0.weight": (8, 10), "0.bias": (8,)})
    assert [row.parameters for row in rows] == [88 + 10, 88, 10]
    assert all(row.flops is None and row.activation_bytes is None and row.output_shape is None for row in rows)


def test_counting_leaves_no_trace() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    net.register_buffer("calls", torch.zeros(()), persistent=False)
    net.register_forward_hook(lambda module, given, output: module.calls.add_(1))
    state = {name: value.clone() for name, value in [*net.named_parameters(), *net.named_buffers()]}
    random = torch.get_rng_state()
    hooks = [(len(part._forward_hooks), len(part._forward_pre_hooks)) for part in net.modules()]
    x = torch.ones(5, 3)

    def fail() -> None:
        net(x)
        raise RuntimeError("broken")

    assert summarise(net, lambda: net(x).sum())[0].flops == 2 * 5 * 3 * 4
    with pytest.raises(RuntimeError, match="broken"):
        summarise(net, fail)
    assert torch.equal(torch.get_rng_state(), random)
    for name, value in [*net.named_parameters(), *net.named_buffers()]:
        assert torch.equal(value, state[name]), name
    assert all(parameter.grad is None for parameter in net.parameters())
    assert [(len(part._forward_hooks), len(part._forward_pre_hooks)) for part in net.modules()] == hooks
    assert torch.is_grad_enabled()
