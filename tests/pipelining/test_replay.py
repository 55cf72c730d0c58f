"""A stage's part of a step, for models of every form: in one process, against the whole model."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from paraflow.pipelining.absent import Absent
from paraflow.pipelining.replay import Replay
from tests.pipelining.one_process import assert_same, forward, shapes


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_a_sequential() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
    made = assert_same(model, [["0"], ["2"], ["4"]], lambda m: F.cross_entropy(m(x), y))
    # What a layer without parameters computes is done where its input is made.
    assert shapes(made) == [[(5, 8)], [(5, 6)]]
    assert made[0].traffic.returned.shape == ()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 8)

    def forward(
        self, x: Tensor, mask: Tensor, *, positions: Tensor, extra: Any = None
    ) -> tuple[Tensor, dict[str, Any]]:
        given = x + positions
        attended, _ = self.attention(given, given, given, key_padding_mask=~mask, need_weights=False)
        return self.out(attended) + x, {"mean": attended.mean(), "extra": extra}


class Masked(nn.Module):
    """Blocks in a list, with a mask of the batch, positions from a table, and what blocks return in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(9, 8), nn.Embedding(7, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = tokens > 0
        positions = self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x, means = self.table(tokens) * self.scale, []
        for block in self.blocks:
            x, found = block(x, mask, positions=positions)
            means.append(found["mean"])
        return self.head(x) + torch.stack(means).sum()


MASKED = [["table", "positions", "blocks.0"], ["blocks.1"], ["blocks.2"], ["blocks.3", "head"]]


def test_blocks_in_a_list_with_a_mask_and_positions_beside_them() -> None:
    tokens = torch.randint(0, 9, (3, 6)).index_fill(1, torch.tensor([0]), 1)
    made = assert_same(Masked(), MASKED, lambda m: F.cross_entropy(m(tokens).transpose(1, 2), tokens))
    # The mask is made of the batch on every stage; means of all blocks are used by the last.
    assert shapes(made)[2] == [(6, 8), (), (), (3, 6, 8), ()]
    assert made[0].replay.weights_used_outside(made[0].traffic) == {"scale": {0}}


class Translation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 8)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 9)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, x = self.table(source), self.table(target)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.head(x)


def test_an_encoder_and_a_decoder_that_looks_at_it() -> None:
    source, target = torch.randint(0, 9, (3, 6)), torch.randint(0, 9, (3, 5))
    stages = [["table", "encoder.0"], ["encoder.1"], ["decoder.0"], ["decoder.1", "head"]]
    made = assert_same(
        Translation(), stages, lambda m: F.cross_entropy(m(source, target).transpose(1, 2), target), tolerance=2e-6
    )
    assert shapes(made) == [[(3, 5, 8), (3, 6, 8)], [(3, 5, 8), (3, 6, 8)], [(3, 6, 8), (3, 5, 8)]]


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, stride=2, padding=1)])
        self.middle = nn.Sequential(nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1))
        self.up = nn.ModuleList([nn.ConvTranspose2d(16, 4, 2, stride=2), nn.Conv2d(8, 1, 3, padding=1)])

    def forward(self, image: Tensor) -> Tensor:
        skips, x = [], image
        for layer in self.down:
            x = layer(x).relu()
            skips.append(x)
        x = self.middle(x)
        for layer in self.up:
            x = layer(torch.cat([x, skips.pop()], dim=1))
        return x


def test_a_u_net_whose_skips_cross_two_boundaries() -> None:
    image = torch.randn(2, 1, 8, 8)
    stages = [["down.0"], ["down.1"], ["middle"], ["up.0"], ["up.1"]]
    made = assert_same(UNet(), stages, lambda m: F.mse_loss(m(image), image))
    assert [len(crossing) for crossing in shapes(made)] == [1, 2, 2, 1]
    for number, stage in enumerate(made):
        moved = stage.model.get_submodule("middle.0")._buffers["num_batches_tracked"]
        assert (None if moved is None else int(moved)) == (1 if number == 2 else None)


class Tied(nn.Module):
    def __init__(self, *, by_module: bool) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(9, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 9, bias=False) if by_module else None
        if self.head is not None:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.body(self.table(tokens))
        return F.linear(x, self.table.weight) if self.head is None else self.head(x)


def test_a_tied_head_that_is_a_module() -> None:
    tokens = torch.randint(0, 9, (3, 6))
    step = lambda m: F.cross_entropy(m(tokens).transpose(1, 2), tokens)  # noqa: E731
    stages = [["table"], ["body"], ["head"]]
    made = assert_same(Tied(by_module=True), stages, step, kept=["table.weight", "head.weight"])
    assert made[0].replay.weights_used_outside(made[0].traffic) == {}


def test_a_tied_head_that_is_code() -> None:
    tokens = torch.randint(0, 9, (3, 6))
    step = lambda m: F.cross_entropy(m(tokens).transpose(1, 2), tokens)  # noqa: E731
    made = assert_same(Tied(by_module=False), [["table"], ["body"]], step, kept=["table.weight"])
    assert made[0].replay.weights_used_outside(made[0].traffic) == {"table.weight": {0, 1}}


class Glue(nn.Module):
    """Two layers, and what a test does between them."""

    def __init__(self, between: Any, **kept: Any) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        if between is _computes_its_own_way:
            self.second = Localised(4, 4)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.between(self, x)


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -grads[0]


class Local(Tensor):
    """A tensor that computes functions with custom autograd functions of its own, as split logits do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.softplus:
            return super().__torch_function__(func, types, args, kwargs)
        x = Turned.apply(Turned.apply(args[0].as_subclass(Tensor)))
        return torch.log1p(x.exp())


class Localised(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if isinstance(y, Absent) or type(y).__name__ == "FakeTensor" else y.as_subclass(Local)


def _computes_its_own_way(m: Any, x: Tensor) -> Tensor:
    y = F.softplus(m.second(m.first(x)))
    return m.third(y * 2)


def _turns_gradients(m: Any, x: Tensor) -> Tensor:
    y = Turned.apply(m.first(x))
    z = Turned.apply(m.second(y))
    return m.third(Turned.apply(z + Turned.apply(x)))


def _adds_in_place(m: Any, x: Tensor) -> Tensor:
    kept = m.first(x)
    y = m.second(kept)
    y += kept
    y[:, 0] = kept[:, 1] * 2
    return m.third(y) + y


def _writes_into_what_was_received(m: Any, x: Tensor) -> Tensor:
    y = m.first(x)
    z = m.second(y + 0)
    y[:, :2] += z[:, :2]  # y is of the first stage
    y.mul_(2)
    return m.third(z) + y


def _fills_a_tensor_of_the_batch(m: Any, x: Tensor) -> Tensor:
    steps = torch.zeros(x.shape[0], 3, 4)
    y = x
    for i, layer in enumerate([m.first, m.second, m.third]):
        y = layer(y)
        steps[:, i] = y
    rows = torch.zeros_like(x)
    rows[:, 1] += y[:, 1]
    return steps.sum(1) + rows


def _masks_of_what_layers_gave(m: Any, x: Tensor) -> Tensor:
    y = m.first(x)
    largest = y.argmax(-1, keepdim=True)  # int64: crosses without a gradient
    positive = y > 0
    y = m.second(y)
    return m.third(y).masked_fill(positive, 0.0).scatter(1, largest, 1.0)


def _takes_apart(m: Any, x: Tensor) -> Tensor:
    a, b = m.first(x).chunk(2, dim=-1)
    values, places = torch.cat([b, a], -1).sort(-1)
    first, *others = m.second(values)
    rows = torch.stack([first, *others])
    return m.third(rows) + places


def _passes_on_and_uses(m: Any, x: Tensor) -> Tensor:
    y = m.first(x)
    return m.third(m.second(y) + y) + y


def _without_gradients_in_part(m: Any, x: Tensor) -> Tensor:
    y = m.first(x)
    with torch.no_grad():
        target = m.second(y)
    return m.third(y) - target.detach()


def _under_a_device(m: Any, x: Tensor) -> Tensor:
    y = m.first(x)
    with torch.device("cpu"):
        y = m.second(y) + torch.ones(4)
        return m.third(y) + torch.arange(y.shape[-1], device=y.device)


def _uses_weights(m: Any, x: Tensor) -> Tensor:
    y = m.first(x)
    return m.third(m.second(y)) + m.third.weight.sum() + m.second.bias.to(y.dtype)


def _runs_again_for_backward(m: Any, x: Tensor) -> Tensor:
    y = m.first(x)
    y = checkpoint(m.second, y, use_reentrant=False)
    return checkpoint(lambda z: m.third(z).relu(), y, use_reentrant=False)


def _returns_what_it_was_given(m: Any, x: Tensor) -> Tensor:
    y = m.first(x).contiguous()
    z = F.dropout(y, 0.5, training=False).to(y.device)
    return m.third(m.second(z)) + y + z


@pytest.mark.parametrize(
    "between",
    [
        _turns_gradients,
        _computes_its_own_way,
        _adds_in_place,
        _writes_into_what_was_received,
        _fills_a_tensor_of_the_batch,
        _masks_of_what_layers_gave,
        _takes_apart,
        _passes_on_and_uses,
        _without_gradients_in_part,
        _under_a_device,
        _uses_weights,
        _runs_again_for_backward,
        _returns_what_it_was_given,
    ],
)
def test_code_between_layers(between: Any) -> None:
    x = torch.randn(5, 4)
    kept = ["second.bias"] if between is _uses_weights else []
    assert_same(Glue(between), [["first"], ["second"], ["third"]], lambda m: m(x).square().mean(), kept)


def test_a_layer_that_looks_at_values_is_run_on_zeros_in_a_trace() -> None:
    class Chooser(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            chosen = (y > 0).nonzero()
            return y * 2 if len(chosen) > 3 and bool(y.sum() > 0) else y

    model = nn.Sequential(nn.Linear(4, 4), Chooser(4, 4), nn.Linear(4, 4))
    x = torch.randn(5, 4)
    assert_same(model, [["0"], ["1"], ["2"]], lambda m: m(x).square().mean())


def test_a_frozen_first_stage_gets_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(True)
    model[0].requires_grad_(False)
    x = torch.randn(5, 4)
    made = assert_same(model, [["0"], ["1"]], lambda m: m(x).square().mean())
    assert not made[0].traffic.crossing[0][0].requires_grad


def test_a_stage_of_which_nothing_is_called_passes_on() -> None:
    model = Glue(lambda m, x: m.third(m.first(x)) if x.shape[0] > 3 else m.second(m.first(x)))
    x = torch.randn(5, 4)
    assert_same(model, [["first"], ["second"], ["third"]], lambda m: m(x).square().mean())
    assert_same(model, [["first"], ["second"], ["third"]], lambda m: m(x[:2]).square().mean())


def test_evaluation_and_what_a_step_returns() -> None:
    model = Masked().eval()
    tokens = torch.randint(1, 9, (3, 6))

    def step(m: nn.Module) -> dict[str, Any]:
        output = m(tokens)
        return {"loss": output.mean(), "output": output, "target": tokens, "name": "x", "none": None}

    with torch.no_grad():
        made = forward(model, MASKED, step)
        expected = step(model)
    given = made[-1].given
    torch.testing.assert_close([given["loss"], given["output"]], [expected["loss"], expected["output"]])
    assert given["target"] is tokens
    returned = made[0].traffic.returned
    assert (returned["output"].shape, returned["name"], returned["none"]) == ((3, 6, 9), "x", None)


def test_a_step_in_inference_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(5, 4)

    def step(m: nn.Module) -> Tensor:
        with torch.inference_mode():
            return m(x)

    with torch.no_grad():
        torch.testing.assert_close(forward(model, [["0"], ["2"], ["4"]], step)[-1].given, step(model))


def test_autocast_is_seen() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4))
    x = torch.randn(5, 4)

    def step(m: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m(x).float().square().mean()

    made = assert_same(model, [["0"], ["1"], ["2"]], step, tolerance=1e-3)
    assert [crossing[0].dtype for crossing in made[0].traffic.crossing] == [torch.bfloat16, torch.bfloat16]


def test_dropout_of_a_stage_draws_from_the_stream_of_its_own_part() -> None:
    model = Glue(lambda m, x: m.third(F.dropout(m.second(m.first(x + torch.rand(4))), 0.5)) * torch.rand(1))
    x = torch.randn(5, 4)
    replay = Replay(model, [["first"], ["second"], ["third"]])
    before = torch.get_rng_state()
    traffic = replay.trace(lambda: model(x))
    assert torch.equal(torch.get_rng_state(), before), "a trace draws nothing"
    log: list[str] = []

    @contextmanager
    def own_part(*, everything: bool) -> Iterator[None]:
        assert not everything
        log.append("in")
        yield
        log.append("out")

    replay.own_part = own_part
    received: list[Tensor] = []
    expected = [["in", "out"], ["in", "out", "in", "out"], ["in", "out"]]  # a unit, a unit and its dropout, a unit
    for stage in range(3):
        log.clear()
        given = replay.run(stage, lambda: model(x), received, traffic)
        assert log == expected[stage]
        received = [t.detach().requires_grad_() for t in given.tensors] if stage < 2 else []
    assert given.shape == (5, 4)


def test_nothing_stays_behind() -> None:
    model = Glue(_adds_in_place)
    x = torch.randn(5, 4)
    expected = model(x)
    replay = Replay(model, [["first"], ["second"], ["third"]])
    traffic = replay.trace(lambda: model(x))
    given = replay.run(0, lambda: model(x), [], traffic)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert not any(isinstance(t, Absent) for t in given.tensors)
    assert torch.equal(model(x), expected)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    assert torch.overrides._get_current_function_mode_stack() == []  # type: ignore[no-untyped-call]

    def fails() -> Tensor:
        model.first(x)
        raise KeyError("of the user")

    with pytest.raises(KeyError):
        replay.run(0, fails, [], traffic)
    assert torch.equal(model(x), expected)


def test_other_hooks_see_real_tensors_and_a_compiled_layer_is_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    replay = Replay(model, [["0"], ["1"]])
    calls: list[str] = []
    plain = model[1]._call_impl
    model[1]._compiled_call_impl = lambda *a: (calls.append("compiled"), plain(*a))[1]
    seen: list[type] = []
    model[1].register_forward_pre_hook(lambda module, args: seen.append(type(args[0])))
    x = torch.randn(5, 4)
    traffic = replay.trace(lambda: model(x))
    assert calls == []
    replay.run(1, lambda: model(x), [torch.randn(5, 4)], traffic)
    assert calls == ["compiled"]
    assert seen == [Tensor]


def test_a_trace_changes_no_module() -> None:
    class Counting(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            self.register_buffer("count", torch.zeros(()))
            self.calls = 0
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            self.calls += 1
            self.count = self.count * 1
            self.last = self.layers[0](x)
            return self.layers[1](self.last)

    model = Counting()
    count, x = model.count, torch.randn(5, 4)
    replay = Replay(model, [["layers.0"], ["layers.1"]])
    traffic = replay.trace(lambda: model(x))
    assert (float(model.count), model.calls, model.last) == (0.0, 0, None)
    assert model.count is count
    for _ in range(2):
        replay.run(1, lambda: model(x), [torch.randn(5, 4)], traffic)
    assert (float(model.count), model.calls) == (2.0, 2)


def test_a_step_that_writes_into_its_batch_is_known() -> None:
    def step(m: nn.Module, x: Tensor, *, writes: bool) -> Tensor:
        mask = torch.zeros(5)
        mask[1:] = 1
        part = (x if writes else x.clone())[:, 1:]
        part[0] = 0
        return m(x) * mask[:, None]

    def late(m: nn.Module, x: Tensor, *, writes: bool) -> Tensor:
        y = m(x)
        (x if writes else torch.zeros_like(x))[:, 0] = y[:, 0]
        return y

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for writes in (False, True):
        for called in (step, late):
            run = partial(called, model, torch.randn(5, 4), writes=writes)
            assert Replay(model, [["0"], ["1"]]).trace(run).writes_batch == writes


def test_a_trace_holds_no_batch() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    replay = Replay(model, [["0"], ["1"]])
    x = torch.randn(5, 4)
    given = [x]
    traffic = replay.trace(lambda: model(given[0] * 2) + given[0])
    batch = weakref.ref(given.pop())
    del x
    gc.collect()
    assert batch() is None
    assert traffic.crossing[0][0].shape == (5, 4)


def test_what_a_stage_computes_is_let_go_of_when_it_is_left() -> None:
    model = Glue(lambda m, x: m.third(m.second((m.first(x) * 2).relu())))
    replay = Replay(model, [["first"], ["second"], ["third"]])
    x = torch.randn(5, 4)
    traffic = replay.trace(lambda: model(x))
    received = torch.randn(5, 4, requires_grad=True)
    leaf = weakref.ref(received)
    gc.collect()
    gc.disable()
    try:
        given = replay.run(1, lambda: model(x), [received], traffic)
        del received, given
        assert leaf() is None
    finally:
        gc.enable()


def test_a_model_without_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    replay = Replay(model, [["0", "1"], ["2"]], device="cpu")
    model.to_empty(device="cpu")
    traffic = replay.trace(lambda: model(torch.ones(3, 4)))
    assert traffic.crossing[0][0].shape == (3, 8)
