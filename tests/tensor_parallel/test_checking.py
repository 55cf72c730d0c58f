"""What is split unasked is compared with whole layers, once: wrong numbers are refused, and right ones are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import paraflow as pf
from paraflow.tensor_parallel.derive import find_attentions
from paraflow.tensor_parallel.dropout import Drops
from paraflow.tensor_parallel.layout import layout_of
from paraflow.tensor_parallel.likeness import copies
from paraflow.tensor_parallel.reading import is_in_shapes_only
from tests.tensor_parallel.models import causal_lm, rows

WIDTH, INNER = 16, 32


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(functional.relu(self.fc1(x)))


class Softmax(Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x).softmax(-1))


class ReadTwice(Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = functional.relu(self.fc1(x))
        return self.fc2(inner) + inner.mean(-1, keepdim=True)


class Gated(Pair):
    """Its outputs are right when it is split; the gradient of the gate is that of a rank's own features."""

    def __init__(self) -> None:
        super().__init__()
        self.open = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x).tanh() * self.open(x).sigmoid())


class OneRank(Pair):
    """Its second output is right on the rank that has the first feature, and wrong on all others."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = functional.relu(self.fc1(x))
        return self.fc2(inner), inner[..., 0].mean()


class SmallOutput(Pair):
    """What a rank gets wrong is a small part of what is added to the input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = functional.relu(self.fc1(x))
        return x + 0.01 * self.fc2(inner) + 4e-4 * inner.mean(-1, keepdim=True).detach()


class SmallGradient(Gated):
    """Those of the gate are wrong, and far smaller than all others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x).tanh() * (1 + 2e-4 * self.open(x).tanh()))


class Turned(nn.Module):
    """What attentions share, as they share rotary embeddings: its buffer is kept for their backward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Recording(Pair):
    """It keeps what it has seen, in every way that a module may."""

    def __init__(self, turned: Turned) -> None:
        super().__init__()
        self.turned, self.losses, self.calls, self.by_name = turned, [], 0, {"seen": [0]}
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("written", torch.zeros(()))
        self.hooked: list[int] = []
        hooked = self.hooked
        self.fc1.register_forward_hook(lambda layer, inputs, output: hooked.append(1))
        self.fc2.register_forward_pre_hook(self.note)
        self.noted = 0

    def note(self, layer: nn.Module, inputs: Any) -> None:
        self.noted += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps = self.steps + 1
        self.written.data.add_(1)
        self.calls += 1
        self.by_name["seen"].append(self.calls)
        out = self.fc2(functional.relu(self.fc1(self.turned(x))))
        self.losses.append(out.mean().detach())
        self.last = out.detach()
        return out

    def kept(self) -> list[Any]:
        numbers = [self.calls, self.noted, int(self.steps), int(self.written)]
        return [*numbers, len(self.losses), len(self.hooked), self.by_name["seen"]]


class Recordings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        turned = Turned()
        self.one, self.two = Recording(turned), Recording(turned)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(x + self.one(x))


class HookedOwner(Pair):
    """What its hooks change, they change once."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda layer, inputs, output: output * 2)


class CalledFromElsewhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Pair()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner.fc2(functional.normalize(self.inner.fc1(x), dim=-1))


class Heads(nn.Module):
    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.dim, self.num_heads, self.head_dim = WIDTH, heads, WIDTH // heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def bias(self, tokens: int) -> torch.Tensor | float:
        return 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            p(x).view(batch, tokens, self.num_heads, self.head_dim).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = (q @ k.transpose(-1, -2) / self.dim**0.5 + self.bias(tokens)).softmax(-1)
        return self.o_proj((scores @ v).transpose(1, 2).reshape(batch, tokens, -1))


class Slopes(Heads):
    def bias(self, tokens: int) -> torch.Tensor:
        slopes = 2.0 ** (-8.0 * torch.arange(1, self.num_heads + 1) / self.num_heads)
        return -torch.arange(tokens) * slopes[:, None, None]


class SlopesKept(Heads):
    """With a head on each rank its outputs are right when it is split; a rank has gradients of its head alone."""

    def __init__(self) -> None:
        super().__init__(2)
        self.kept = {"slopes": torch.tensor([0.5, 0.1])}

    def bias(self, tokens: int) -> torch.Tensor:
        return -torch.arange(tokens) * self.kept["slopes"][:, None, None]


class Block(nn.Module):
    def __init__(self, mixes: bool = False, more: bool = False) -> None:
        super().__init__()
        self.attention, self.norm, self.mixes, self.more = Heads(), nn.LayerNorm(WIDTH), mixes, more

    def forward(self, x: torch.Tensor) -> Any:
        tokens = x.shape[1]
        x = x + self.attention(self.norm(x))
        if self.more and tokens == 3 and torch.distributed.get_rank() == 1:
            return x, x.sum()
        return x - x.mean(1, keepdim=True) if self.mixes else x


class Blocks(nn.Module):
    def __init__(self, mixes: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(mixes == "inside", mixes == "more") for _ in range(2))
        self.between = mixes == "between"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x - x.mean(1, keepdim=True) if self.between else x)
        return x


class Net(pf.Model):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner, self.head = nn.Linear(WIDTH, WIDTH), inner, nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        inner = self.inner(x)
        return self.head((x + (sum(inner) if isinstance(inner, tuple) else inner)).mean(1))


SHARES = {"sequence_parallel": True}
CASES: dict[str, tuple[type[nn.Module], tuple[Any, ...], dict[str, Any]]] = {
    "pair": (Pair, (), {}),
    "attention": (Heads, (), {}),
    "blocks": (Blocks, (), SHARES),
    "recordings": (Recordings, (), {}),
    "hooked owner": (HookedOwner, (), {}),
    "said": (Softmax, (), {"plan": {"inner.fc1": "colwise_joined", "inner.fc2": "rowwise"}}),
    "softmax": (Softmax, (), {}),
    "read twice": (ReadTwice, (), {}),
    "gated": (Gated, (), {}),
    "one rank": (OneRank, (), {}),
    "small output": (SmallOutput, (), {}),
    "small gradient": (SmallGradient, (), {}),
    "elsewhere": (CalledFromElsewhere, (), {}),
    "slopes": (Slopes, (), {}),
    "slopes kept": (SlopesKept, (), {}),
    "mixes inside": (Blocks, ("inside",), SHARES),
    "more on one rank": (Blocks, ("more",), SHARES),
    "mixes between": (Blocks, ("between",), SHARES),
}


def trained(name: str, plugins: list[Any], **plan: Any) -> list[float] | str:
    make, arguments, _ = CASES[name]
    torch.manual_seed(0)
    model = pf.configure(Net(make(*arguments)), optimizer="sgd", lr=0.1, loss="cross_entropy")
    generator = torch.Generator().manual_seed(1)
    data = (torch.randn(16, 6, WIDTH, generator=generator), torch.randint(5, (16,), generator=generator))
    trainer = pf.Trainer(max_epochs=2, progress=False, plugins=plugins, **plan)
    try:
        return trainer.fit(model, data, batch_size=8).history["loss"]
    except pf.ModelError as error:
        return str(error)


def all_trained() -> dict[str, Any]:
    found = {name: trained(name, [pf.plugins.TensorParallel(2, **case[2])]) for name, case in CASES.items()}
    again = {"activation_checkpointing": ["inner*"]}  # a comparison is no part of what is run again
    return {**found, "run again": trained("attention", [pf.plugins.TensorParallel(2)], **again)}


def test_wrong_numbers_are_refused_on_all_ranks_and_right_ones_trained(ranks: Any) -> None:
    for found in ranks(2, all_trained):
        for name in ("pair", "attention", "blocks", "recordings", "hooked owner", "said"):
            assert found[name] == pytest.approx(trained(name, []), rel=1e-5), name
        assert found["run again"] == pytest.approx(found["attention"], rel=1e-6)
        for name in (
            "softmax",
            "read twice",
            "gated",
            "one rank",
            "small output",
            "small gradient",
            "slopes",
            "slopes kept",
        ):
            assert f"inner ({CASES[name][0].__name__}) is split over tp=2 ranks" in found[name], name
            assert "plan={'inner." in found[name], name
        assert "called from somewhere else than its forward" in found["elsewhere"]
        assert "inner.blocks.0 (Block) computes on shares of the sequence" in found["mixes inside"]
        assert "inner.blocks.0 (Block) computes on shares" in found["more on one rank"]
        assert "inner.blocks.1 was given something else than the block before it" in found["mixes between"]


class WithRow(Heads):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.ones(size))


def test_heads_are_not_shared_out_where_a_buffer_has_one_row_for_each() -> None:
    assert find_attentions(WithRow(3))
    assert not find_attentions(WithRow(4))


def test_nothing_is_derived_from_code_that_cannot_be_read() -> None:
    names: dict[str, Any] = {}
    exec("def forward(self, x):\n    return self.fc2(self.fc1(x))", names)
    hidden = type("Hidden", (Pair,), {"forward": names["forward"]})
    assert layout_of(Pair())
    assert not layout_of(hidden())


def test_a_width_that_scales_scores_is_no_shape() -> None:
    assert not is_in_shapes_only(Heads, "dim")
    assert is_in_shapes_only(Heads, "head_dim")


class DropsByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, self.p, self.training)


def test_dropout_is_known_by_its_call_too() -> None:
    assert Drops(DropsByName())
    assert not Drops(DropsByName().eval())
    assert not Drops(Pair())


class Cache:
    def __init__(self) -> None:
        self.keys = [torch.ones(2, requires_grad=True) * 2]


def test_what_a_comparison_is_given_is_left_as_it_was() -> None:
    cache = Cache()
    (copied,), leaves = copies((cache,))
    copied.keys.append(torch.zeros(1))
    copied.keys[0].mul_(3)
    assert len(cache.keys) == len(leaves) == 1
    assert torch.equal(cache.keys[0], torch.full((2,), 2.0))


def states() -> tuple[torch.Tensor, torch.Tensor]:
    """A model's random numbers after a comparison, and without one."""
    found = []
    for plan in ({}, {"blocks.*.feed_forward.*": "replicate"}):
        torch.manual_seed(0)
        trainer = pf.Trainer(max_steps=1, progress=False, plugins=[pf.plugins.TensorParallel(2, plan=plan)])
        trainer.fit(causal_lm(dropout=0.0), rows(), batch_size=8)
        found.append(torch.rand(3))
    return found[0], found[1]


def test_a_comparison_draws_nothing(ranks: Any) -> None:
    for compared, other in ranks(2, states):
        assert torch.equal(compared, other)


def kept_after_a_step() -> list[Any]:
    model = pf.configure(Net(inner := Recordings()), optimizer="sgd", lr=0.1, loss="cross_entropy")
    data = (torch.randn(8, 6, WIDTH), torch.randint(5, (8,)))
    pf.Trainer(max_steps=1, progress=False, plugins=[pf.plugins.TensorParallel(2)]).fit(model, data, batch_size=8)
    return [*inner.one.kept(), *inner.two.kept()]


def test_a_comparison_leaves_no_trace(ranks: Any) -> None:
    once = [1, 1, 1, 1, 1, 1, [0, 1]]
    assert ranks(2, kept_after_a_step) == [[*once, *once]] * 2
