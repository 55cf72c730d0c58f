"""However a block's activations are kept, losses, gradients, buffers and random states are the same bit by bit."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paraflow.errors import ModelError
from paraflow.planner.recomputation import Treatment
from paraflow.profiler import activation_bytes
from paraflow.recompute import Caches, TreatedBlocks, repeated_blocks
from tests.recompute.models import MLP, MODELS, Stack

PRODUCTS = tuple((f"aten.{name}.default", place) for name in ("addmm", "mm", "convolution", "sin") for place in (0, 1))
KINDS = ["full", "selective", "offload", "operations"]


def treated(model: nn.Module, kind: str, min_bytes: int = 0) -> TreatedBlocks:
    blocks, made = repeated_blocks(model), TreatedBlocks()
    if kind == "operations":
        made.treat(blocks, dict.fromkeys(blocks, Treatment("operations", PRODUCTS)), min_bytes)
    elif kind != "keep":
        made.treat_all(blocks, kind, min_bytes)
    return made


def trained(model: nn.Module, kind: str, steps: int = 3) -> list[torch.Tensor]:
    """All that three steps leave: losses, gradients, weights, buffers, and the next random numbers."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    seen: list[torch.Tensor] = []
    blocks = treated(model, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)  # so small that nothing becomes NaN, which equals nothing
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(2):
            with blocks:
                loss = model(torch.randn(5, 6))
            loss.backward()
            seen += [loss.detach(), torch.rand(1), torch.tensor([random.random(), np.random.rand()])]
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    seen += [p.detach().clone() for p in model.parameters()] + [b.clone() for b in model.buffers()]
    return seen + [m.generator.get_state() for m in model.modules() if hasattr(m, "generator")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_training_is_the_same_bit_by_bit(name: str, kind: str) -> None:
    torch.manual_seed(1)
    model = MODELS[name]()
    expected = trained(copy_of(model), "keep")
    assert all(torch.equal(a, b) for a, b in zip(expected, trained(model, kind), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_backward_may_run_twice(kind: str) -> None:
    def twice(model: nn.Module, kind: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with treated(model, kind):
            loss = model(torch.randn(5, 6))
        loss.backward(retain_graph=True)
        loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for name in ("router", "in place", "normed"):
        model = MODELS[name]()
        expected = twice(copy_of(model), "keep")
        assert all(torch.equal(a, b) for a, b in zip(expected, twice(model, kind), strict=True)), name


def copy_of(model: nn.Module) -> nn.Module:
    """A copy; generators are not copied by torch."""
    parts = {id(m.generator): m.generator for m in model.modules() if hasattr(m, "generator")}
    copies = {key: torch.Generator().set_state(generator.get_state()) for key, generator in parts.items()}
    return copy.deepcopy(model, copies)


@pytest.mark.parametrize("kind", KINDS)
def test_the_module_is_as_it_was(kind: str) -> None:
    model = MODELS["mlp"]()
    names = [name for name, _ in model.named_parameters()]
    blocks = treated(model, kind)
    with blocks:
        with blocks:
            inside = [name for name, _ in model.named_parameters()]
        model(torch.randn(5, 6)).backward()
        assert "forward" in vars(model.blocks[0])
        with torch.no_grad():
            model(torch.randn(5, 6))
    assert inside == names
    assert not any("forward" in vars(part) for part in model.modules())


def test_less_is_kept() -> None:
    model = Stack(*(MLP() for _ in range(4)))
    batch = torch.randn(64, 6)

    def kept(kind: str) -> int:
        blocks = treated(model, kind)

        def step(x: Any) -> Any:
            with blocks:
                return model(x)

        step(batch).backward()
        return activation_bytes(model, step, batch)

    everything, full, offload = kept("keep"), kept("full"), kept("offload")
    row = 64 * 4
    assert full == row * (6 + 8 * 4 + 8)  # what the stem takes, each block's input, the loss's
    assert offload < full < everything / 3


def test_a_block_that_changes_its_input_is_refused() -> None:
    model = Stack(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)), nn.Sequential(nn.ReLU(), nn.Linear(8, 8)))
    with treated(model, "full"), pytest.raises(ModelError, match=r"'blocks\.0' changes its input in place"):
        model(torch.randn(5, 6))


def test_what_is_chosen_is_never_run_again() -> None:
    model, calls = MODELS["router"](), []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    with Count(), treated(model, "full"):
        model(torch.randn(5, 6)).backward()
    assert calls.count("aten.topk.default") == calls.count("aten.multinomial.default") == 2
    assert calls.count("aten.addmm.default") > 2 * 5 + 1


class Odd(nn.Module):
    """Does at its second call what cannot be told from its code."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear, self.what, self.calls, self.seen = nn.Linear(8, 8), what, 0, []
        self.register_buffer("codes", torch.ones(2**18 + 1))  # too large to be copied every time

    def forward(self, x: Any) -> Any:
        x = self.linear(x).sin() * self.codes[:8].clone()
        self.calls += 1
        if self.what == "cache":
            self.seen.append(x.detach())
            return (torch.cat([x, *self.seen]).sin()[: len(x)]).sin()
        if self.calls == 1:
            return x
        if self.what == "buffer":
            self.codes.mul_(0.5)
            return x
        return (x * getattr(torch, "arg" + "sort")(x, -1)).sin()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("choice", r"'blocks\.0' runs aten\.sort.*activation_checkpointing='selective'"),
        ("buffer", r"'blocks\.0' has a tensor 'codes' of 1,048,580 bytes.*Write self\.codes = "),
        ("cache", r"'blocks\.0' did something else when it ran again.*use_cache = False"),
    ],
)
def test_what_cannot_run_again_is_refused_by_a_sentence(what: str, said: str) -> None:
    model = Stack(Odd(what))
    blocks = treated(model, "keep")
    blocks.treat({"blocks.0": model.blocks[0]}, {"blocks.0": Treatment("recompute")}, 0)
    for step in range(3 if what != "cache" else 1):
        with blocks:
            loss = model(torch.randn(5, 6))
        if step == 1 or what == "cache":
            with pytest.raises(ModelError, match=f"(?s){said}"):
                loss.backward()
        else:
            loss.backward()  # after it was refused, it is known


def test_caches_are_switched_off_while_a_model_is_trained() -> None:
    configuration = pytest.importorskip("transformers").PretrainedConfig()
    configuration.use_cache = True
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.config = model[0].config = configuration
    model[1].config = SimpleNamespace(use_cache=True)  # the user's own
    with Caches(model):
        assert not model.config.use_cache
        assert model[1].config.use_cache
    with torch.no_grad(), Caches(model):
        assert model.config.use_cache
    assert model.config.use_cache


def test_offloaded_copies_go_with_the_graph() -> None:
    import gc
    import weakref

    from paraflow.recompute.offload import _Copy

    model = MODELS["mlp"]()
    with treated(model, "offload"):
        loss = model(torch.randn(5, 6))
    there = [weakref.ref(one) for one in gc.get_objects() if isinstance(one, _Copy)]
    assert there
    del loss
    gc.collect()
    assert not any(one() for one in there)
