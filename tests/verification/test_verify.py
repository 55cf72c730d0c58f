"""A plan is compared with one process: it agrees where it is right, and what is wrong is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import paraflow as pf
from paraflow.verification import Measured, Verification
from tests.pool import Pool


class Net(pf.Model):
    def __init__(self, seed: int = 0, norm: bool = False, optimizer: str = "adamw") -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.stem = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.LayerNorm(8)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, 3)
        self.configure(optimizer=optimizer, lr=1e-2, loss="cross_entropy")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(torch.tanh(self.norm(self.stem(x)))))


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(24, 6, generator=generator), torch.randint(0, 3, (24,), generator=generator)


class Doubled(pf.plugins.DataParallel):
    """Adds gradients of two replicas up where it should average them."""

    def reduce_gradients(self, engine: Any) -> None:
        super().reduce_gradients(engine)
        engine.scale_gradients(torch.tensor(2.0))


class Flip(pf.plugins.Plugin):
    """Changes the mathematics, and no layout: one process does the same."""

    name = "flip"

    def step(self, engine: Any, proceed: Any) -> bool:
        for parameter in engine.parameters:
            parameter.grad.neg_()
        return bool(proceed())


def verified(flags: Mapping[str, Any], plugins: list[pf.plugins.Plugin] | None = None, **made: Any) -> Verification:
    model = Net(**made)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = pf.Trainer(max_steps=1, progress=False, plugins=plugins or [], **flags)
    found = trainer.verify(model, rows(), steps=3, batch_size=8)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return found


def on_two_ranks() -> list[Verification]:
    rank = pf.rank()
    return [
        verified({"accumulate": 2, "clip_norm": 0.1}),
        verified({"fsdp": 2}, seed=rank),  # both start from the first rank's weights
        verified({"comm_hook": "bf16"}),
        verified({}, [Doubled()], seed=rank, optimizer="sgd"),
        verified({"accumulate": 2}, [Flip()]),
        verified({"fsdp": 2, "apply_groups": "backward"}),
        verified({}, norm=True),
    ]


def test_what_is_right_agrees_and_what_is_wrong_is_named(ranks: Pool) -> None:
    results = ranks(2, on_two_ranks)
    assert str(results[0]) == str(results[1])
    clipped, sharded, halved, doubled, flipped, backward, normalised = results[0]
    for found in (clipped, sharded, flipped, backward):
        assert found.agrees, str(found)
        assert max(found.loss, found.norm, *found.parameters.values()) < 1e-5
        assert found.without_dropout
        assert len(found.planned.losses) == 3
        assert set(found.parameters) == {
            f"{layer}.{kind}" for layer in ("stem", "norm", "head") for kind in ("weight", "bias")
        }
    assert "clip_norm=0.1" in clipped.plan
    assert "clip_norm" not in sharded.plan
    assert not backward.planned.norms
    assert halved.agrees
    assert 1e-5 < max(halved.parameters.values()) < halved.parameter_bound == 0.3
    assert not doubled.agrees
    assert doubled.planned.norms[0] == pytest.approx(2 * doubled.alone.norms[0])
    # Both ranks' parameters have come twice as far as they should, from the first rank's weights.
    assert 0.5 < doubled.parameters["head.weight"] < 2
    assert "does NOT train as one process does" in str(doubled)
    assert not normalised.agrees
    assert "Batch normalisation" in str(normalised)


def failing_alone() -> str:
    class OnlyInParts(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > 4:
                raise RuntimeError("too many samples")
            return super().forward(x)

    with pytest.raises(pf.ParaflowError) as raised:
        pf.Trainer(max_steps=1, progress=False).verify(OnlyInParts(), rows(), batch_size=8)
    return str(raised.value)


def test_a_reference_that_fails_is_said_on_every_rank(ranks: Pool) -> None:
    for text in ranks(2, failing_alone):
        assert text == (
            "The training on one process, to compare with, raised on rank 0: RuntimeError: too many samples"
        )


def test_one_process_is_compared_with_itself_under_another_plan() -> None:
    assert verified({"activation_checkpointing": ["stem"], "accumulate": 4}).agrees


def test_data_that_can_be_read_once_is_refused() -> None:
    with pytest.raises(pf.DataError, match="verify reads the data twice"):
        pf.Trainer(max_steps=1).verify(Net(), iter([rows()]))


def test_noise_is_not_compared_and_nan_is_the_worst() -> None:
    same = Measured([1.0, 0.5], [2.0, 1.0])
    found = Verification("tp=2", same, same, {"key.bias": 1.5, "weight": 1e-6}, noise=["key.bias"])
    assert found.agrees
    assert found.worst == "weight"
    assert "Not compared, since their gradient is only rounding: key.bias." in str(found)
    broken = Verification("tp=2", Measured([1.0, float("nan")]), Measured([1.0, 0.5]), {"weight": 0.0})
    assert not broken.agrees


def test_two_trainings_without_a_number_do_not_agree() -> None:
    nothing = Measured([float("nan")])
    assert not Verification("tp=2", nothing, nothing, {"weight": 0.0}).agrees


class Noisy(Net):
    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return nn.functional.cross_entropy(self(x + x[torch.randperm(len(x))]), y)


def test_a_step_that_draws_is_told() -> None:
    found = pf.Trainer(max_steps=1, progress=False, accumulate=2).verify(Noisy(), rows(), steps=2, batch_size=8)
    assert not found.agrees
    assert "A step draws random numbers beside dropout" in str(found)


class Attending(pf.Model):
    """Queries and keys from one layer, whose biases of keys have a gradient of nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(8, 24)
        self.head = nn.Linear(8, 3)
        self.configure(optimizer="adamw", lr=1e-2, loss="cross_entropy")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x.view(len(x), 3, 8)).split(8, dim=-1)
        return self.head(nn.functional.scaled_dot_product_attention(query, key, value).mean(1))


def test_elements_whose_gradient_is_rounding_do_not_count() -> None:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(24, 24, generator=generator), torch.randint(0, 3, (24,), generator=generator)
    trainer = pf.Trainer(max_steps=1, progress=False, accumulate=4)
    model = Attending()
    found = trainer.verify(model, data, steps=3, batch_size=8)
    assert found.agrees, str(found)


def test_attention_drops_nothing_while_it_is_verified() -> None:
    from paraflow.verification.dropout import without_dropout

    x = torch.ones(1, 2, 4, 4)
    with without_dropout() as mode:
        first = nn.functional.scaled_dot_product_attention(x, x, x, None, 0.9)
        second = nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.9)
    assert mode.seen
    assert torch.equal(first, x)
    assert torch.equal(second, x)
