"""Recomputed activations where others fail: unused parameters, frozen and sharded weights, routing, compiling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import paraflow as pf
from paraflow.parts import whole
from paraflow.plugins import FSDP, ActivationCheckpointing, DataParallel
from tests.parity.runs import Recorder
from tests.plugins.test_activation_checkpointing import fit, language

KINDS = ["full", "selective", "offload"]


class Block(nn.Module):
    """A part of it is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.unused = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(x))))


class Routed(nn.Module):
    """What is chosen when it runs again would be something else."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 3), nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        logits = self.gate(x).detach() * (1 if self.calls == 1 else -1)
        shares = torch.softmax(self.gate(x), -1)
        chosen = logits.topk(1, -1).indices
        return x + sum(
            (chosen == place) * shares[:, place : place + 1] * expert(x) for place, expert in enumerate(self.experts)
        )


class Stacked(nn.Module):
    def __init__(self, make: type[nn.Module], frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.blocks, self.last = nn.Linear(6, 6), nn.ModuleList(make() for _ in range(3)), nn.Linear(6, 3)
        if frozen:  # all of two blocks and a part of the third, as with adapters
            self.blocks[0].requires_grad_(False)
            self.blocks[1].requires_grad_(False)
            next(self.blocks[2].children()).requires_grad_(False)
            self.first.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            block.calls = 0
            x = block(x)
        return self.last(x)


X = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (12,), generator=torch.Generator().manual_seed(2))


def train(model: nn.Module, *plugins: Any, **plan: Any) -> tuple[list[float], list[float], list[torch.Tensor]]:
    pf.configure(model, optimizer="adamw", lr=1e-2, loss="cross_entropy")
    recorder = Recorder()
    trainer = pf.Trainer(
        max_steps=3, seed=5, progress=False, clip_norm=1.0, callbacks=[recorder], plugins=plugins, **plan
    )
    trainer.fit(model, (X, Y), batch_size=12)
    parameters = [whole(parameter).detach().clone() for parameter in model.parameters()]
    return recorder.losses, recorder.norms, parameters


def treated(kind: str, distribution: Any) -> list[Any]:
    return [ActivationCheckpointing(kind, offload_min_bytes=0), distribution]


def same(mine: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return mine[:2] == other[:2] and all(map(torch.equal, mine[2], other[2]))


def distributed(kind: str) -> Any:
    if kind == "dp":
        return DataParallel(2, find_unused_parameters=True)
    late = {"reduce": "last", "reshard_after_forward": False} if kind == "fsdp, late" else {}
    return FSDP(2, find_unused_parameters=True, **late)


def compare(distribution: str, accumulate: int) -> list[str]:
    """The models and treatments whose training differs from the same without recomputation."""
    differing = []
    for make, frozen in ((Block, False), (Block, True), (Routed, False), (Routed, True)):
        plain = train(Stacked(make, frozen), distributed(distribution), accumulate=accumulate)
        for kind in KINDS:
            mine = train(Stacked(make, frozen), *treated(kind, distributed(distribution)), accumulate=accumulate)
            if not same(mine, plain):
                differing.append(f"{make.__name__} {frozen} {kind}")
    return differing


@pytest.mark.parametrize(("distribution", "accumulate"), [("dp", 1), ("dp", 2), ("fsdp", 2), ("fsdp, late", 3)])
def test_recomputation_changes_no_bit_whatever_is_unused_frozen_or_chosen(
    ranks: Any, distribution: str, accumulate: int
) -> None:
    """accelerate#2017, pytorch#24005, #79171, #83074, #105723: parameters that are unused were "ready only once".

    DeepSpeed#8148: frozen parameters that are sharded. torchtitan#1117: what a router has chosen is not chosen again.
    """
    assert ranks(2, compare, distribution, accumulate) == [[], []]


def compiled(kind: str | None) -> dict[str, Any]:
    recomputed = {} if kind is None else {"activation_checkpointing": kind}
    plan = pf.Plan(dp=2, accumulate=2, compile=True, options={"compile": {"backend": "aot_eager"}}, **recomputed)
    return fit(language(0.0), plan=plan)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_compiled_recomputed_replicas_train_alike(ranks: Any, kind: str) -> None:
    """pytorch#108269, #119440, #144035, #144637: torch.compile, recomputation and DistributedDataParallel together."""
    plain = ranks(2, compiled, None, timeout=300)
    for mine, other in zip(ranks(2, compiled, kind, timeout=300), plain, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
