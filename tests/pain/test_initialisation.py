"""Random numbers where ranks must have the same and where they must not, and optimizers over what is sharded."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import paraflow as pf
from paraflow.parts import whole
from paraflow.plugins import ActivationCheckpointing


class Drawing(pf.Model):
    """Notes what dropout leaves of ones, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3))
        self.masks: list[torch.Tensor] = []
        self.evaluated: list[torch.Tensor] = []
        self.configure(optimizer="adamw", lr=1e-2, loss="cross_entropy")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = functional.dropout(torch.ones(64), 0.5, self.training)
        (self.masks if self.training else self.evaluated).append(mask)
        return self.body(x) * mask[:1]


SAME = torch.ones(16, 4), torch.ones(16, dtype=torch.long)  # every sample alike: only the ranks' own numbers differ


def draw(folder: str, deferred: bool, stop_at: int | None, resume: bool, plan: dict[str, Any]) -> dict[str, Any]:
    """Two steps of two micro-batches in each of two epochs, on ranks whose own generators are apart at first."""
    torch.manual_seed(100 + pf.rank())
    if deferred:
        pf.seed(7)
    with pf.deferred_init() if deferred else nullcontext():
        model = Drawing()
    if deferred:
        torch.manual_seed(100 + pf.rank())
    first: dict[str, torch.Tensor] = {}

    def begin(trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        first.update({name: whole(value).clone() for name, value in trainer.engine.model_state().items()})

    callbacks = [pf.callbacks.Checkpoint(folder, 1), pf.callbacks.LambdaCallback(on_train_begin=begin)]
    trainer = pf.Trainer(
        max_epochs=2, max_steps=stop_at, seed=9, accumulate=2, progress=False, callbacks=callbacks, **plan
    )
    trainer.fit(model, SAME, SAME, batch_size=8, resume=folder if resume else None)
    return {"first": first, "masks": model.masks, "evaluated": model.evaluated}


@pytest.mark.parametrize("plan", [{"dp": 2, "fsdp": 2}, {"fsdp": 4}, {"dp": 4}], ids=str)
def test_dropout_differs_where_samples_do_and_goes_on_after_a_stop(
    ranks: Any, tmp_path: Path, plan: dict[str, Any]
) -> None:
    """pytorch#141220, #168375, slapo#21: replicas and shards see other samples, so each rank draws for itself.

    anemoi-core#595: the first parameters are the same everywhere, though each rank's generator was elsewhere.
    """
    folder = str(tmp_path / "run")
    went = ranks(4, draw, str(tmp_path / "whole"), False, None, False, plan)
    ranks(4, draw, folder, False, 2, False, plan)
    went_on = ranks(4, draw, folder, False, None, True, plan)
    for rank in range(4):
        assert all(torch.equal(value, went[0]["first"][name]) for name, value in went[rank]["first"].items())
        assert len(went[rank]["masks"]) == 8  # a mask a micro-batch
        assert all(torch.equal(mask, torch.ones(64)) for mask in went[rank]["evaluated"])
        assert all(map(torch.equal, went_on[rank]["masks"], went[rank]["masks"][4:]))
    masks = [mask for one in went for mask in one["masks"]]
    assert not any(torch.equal(one, other) for one, other in combinations(masks, 2))


def test_a_model_without_memory_starts_as_in_one_process(ranks: Any, tmp_path: Path) -> None:
    """Where each rank makes its own part only, it is the part of what one process makes after the same `pf.seed`."""
    alone = draw(str(tmp_path / "one"), True, 1, False, {})["first"]
    for plan in ({"dp": 2, "fsdp": 2}, {"fsdp": 4, "zero": 1}):
        for found in ranks(4, draw, str(tmp_path / "many"), True, 1, False, plan):
            assert all(torch.equal(value, alone[name]) for name, value in found["first"].items())


def recomputed(plan: dict[str, Any]) -> tuple[Any, ...]:
    model, plain = Blocks(), Blocks()
    for one, plugins in ((model, [ActivationCheckpointing("full")]), (plain, [])):
        pf.Trainer(max_steps=2, seed=9, progress=False, plugins=plugins, **plan).fit(one, SAME, batch_size=8)
    parameters = [[whole(parameter) for parameter in one.parameters()] for one in (model, plain)]
    return model.masks[:4], plain.masks[:2], *parameters


class Block(nn.Module):
    def __init__(self, masks: list[torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.masks = nn.Linear(4, 4), masks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = functional.dropout(torch.ones(4), 0.5)
        self.masks.append(mask)
        return x + self.linear(x) * mask


class Blocks(pf.Model):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.masks: list[torch.Tensor] = []
        self.blocks = nn.ModuleList(Block(self.masks) for _ in range(2))
        self.configure(optimizer="adamw", lr=1e-2, loss="cross_entropy")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


IMPLEMENTATIONS = ["fused", "foreach", "for-loop"]
OPTIMIZERS = [
    ("adamw", {"weight_decay": 0.1, "amsgrad": True}),
    ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("adagrad", {}),
    ("nadam", {}),
    ("rmsprop", {"centered": True}),
]


def by_optimizers(plan: dict[str, Any]) -> list[list[torch.Tensor]]:
    """The parameters after three clipped steps, of which some are frozen and one is smaller than the ranks are many."""
    results = []
    for name, options in OPTIMIZERS:
        for implementation in IMPLEMENTATIONS if name in ("adamw", "sgd", "adagrad") else ["default"]:
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1))
            model[2].requires_grad_(False)
            pf.configure(model, optimizer=name, lr=1e-2, loss="mse", **options)
            trainer = pf.Trainer(
                max_steps=3,
                seed=1,
                clip_norm=0.1,
                progress=False,
                optimizer_implementation=implementation,
                **plan,
            )
            trainer.fit(model, (X, X.sum(1)), batch_size=8)
            results.append([whole(parameter).detach().clone() for parameter in model.parameters()])
    return results


X = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "plan",
    [{"fsdp": 2}, {"fsdp": 2, "cpu_offload": "optimizer"}, {"fsdp": 2, "zero": 1}, {"tp": 2}],
    ids=str,
)
def test_every_implementation_of_an_optimizer_applies_the_same(ranks: Any, plan: dict[str, Any]) -> None:
    """pytorch#126670, #153354, #183207, TransformerEngine#2424: foreach and fused optimizers over parts."""
    expected = by_optimizers({})
    assert len(expected) >= 11
    for results in ranks(2, by_optimizers, plan):
        torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-6)


def test_what_is_recomputed_draws_the_same(ranks: Any) -> None:
    """The masks of the second forward are those of the first, and training draws what it would have."""
    for masks, plain_masks, parameters, plain in ranks(2, recomputed, {"fsdp": 2, "accumulate": 2}):
        first, second, second_again, first_again = masks  # backward begins with the last block
        assert all(map(torch.equal, (first, second, first_again, second_again), plain_masks * 2))
        assert all(map(torch.equal, parameters, plain))
