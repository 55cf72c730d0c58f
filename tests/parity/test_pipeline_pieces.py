"""What a pipeline gives to all ranks, and what it refuses, where only some of its stages know of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import paraflow as pf
from tests.parity.tasks import samples

FIELDS: dict[str, Any] = {"max_epochs": 2, "seed": 5, "progress": False}


class Picked(pf.Model):
    """Scores marked positions only, so that the shapes of outputs and targets depend on the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 20)
        self.configure(optimizer="sgd", lr=0.1, metrics=["accuracy"])

    def training_step(self, batch: Any) -> Any:
        output, target = self.scores(batch)
        loss = functional.cross_entropy(output, target)
        return {"loss": loss, "weight": len(target), "output": output, "target": target}

    def predict_step(self, batch: Any) -> torch.Tensor:
        return self.scores(batch)[0].sum(0, keepdim=True)[:, : int(batch[1][0, 1])].expand(len(batch[0]), -1)

    def scores(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, labels = batch
        marked = (labels.flatten() >= 0).nonzero()[:, 0]
        hidden = self.table(x)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.head(hidden.flatten(0, 1).index_select(0, marked)), labels.flatten()[marked]


def marked() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 20, (24, 8), generator=generator)
    keep = torch.rand(24, 8, generator=generator) < torch.linspace(0.9, 0.2, 24)[:, None]
    keep[:, :2] = True
    return x, torch.where(keep, x, -100)


class Rows(pf.Model):
    def __init__(self, optimizer: Any = "adamw") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        self.configure(optimizer=optimizer, lr=0.1, loss="cross_entropy")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Chosen(Rows):
    """Its optimizer is for the head, which one stage has."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.body[:4].requires_grad_(False)
        return torch.optim.AdamW(self.body[4].parameters(), lr=0.05)


class Normed(torch.optim.Optimizer):
    """Divides by the norm of all gradients."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in held])
        for p in held:
            p.sub_(p.grad / norm, alpha=0.1)


def hooked(parameters: Any, lr: float) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=lr)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def numbers(model: pf.Model, data: Any, **fields: Any) -> dict[str, list[float]]:
    return pf.Trainer(**FIELDS, **fields).fit(model, data, val=data, batch_size=8).history


def numbers_of_all(**fields: Any) -> list[Any]:
    trainer, model = pf.Trainer(**FIELDS, **fields), Picked()
    predicted = [
        tuple(rows.shape)
        for rows in [trainer.predict(model, [tuple(t[i : i + 4] for t in marked())]) for i in (0, 8, 16)]
    ]
    return [numbers(Picked(), marked(), **fields), numbers(Chosen(), samples(23), **fields), predicted]


def test_outputs_whose_shape_depends_on_the_batch_and_stages_that_train_nothing(ranks: Any) -> None:
    history, chosen, shapes = numbers_of_all()
    for mine, also, predicted in ranks(2, numbers_of_all, pp=2):
        assert predicted == shapes
        for found, expected in ((mine, history), (also, chosen)):
            for name in expected.keys() & {"loss", "val_loss", "accuracy", "val_accuracy", "lr"}:
                assert found[name] == pytest.approx(expected[name], rel=1e-5), name


def said(model: pf.Model, data: Any, **fields: Any) -> str:
    with pytest.raises(pf.ParaflowError) as raised:
        pf.Trainer(**FIELDS, pp=2, **fields).fit(model, data, batch_size=8)
    return str(raised.value)


def said_of_all() -> list[str]:
    x, y = samples(23)
    x[13] = float("nan")
    broken = Rows()
    broken.body[2].register_forward_hook(lambda module, args, output: output / 0)
    guard = [pf.callbacks.NaNGuard()]
    return [
        said(Rows(Normed), samples(23)),
        said(Rows(hooked), samples(23)),
        said(Rows(), (x, y), callbacks=guard),
        said(broken, samples(23), callbacks=guard),
    ]


def test_what_only_one_stage_could_tell_is_said_by_all(ranks: Any) -> None:
    first, second = ranks(2, said_of_all)
    assert first == second
    assert "Normed cannot be applied to some parameters at a time" in first[0]
    assert "A hook is called with the step of SGD" in first[1]
    assert "It began on every rank: its data is not finite: batch[0]" in first[2]
    assert "the output of body.2 (Linear) is not finite, and its inputs are" in first[3]
    assert "its loss is" not in first[3]
