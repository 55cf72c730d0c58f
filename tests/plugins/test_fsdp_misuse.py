"""What sharding would lose silently, or what ranks do not do alike, is refused; a broken-off step leaves nothing."""

from __future__ import annotations

import math
import os
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import paraflow as pf
from paraflow.parts import whole
from paraflow.plugins import FSDP
from tests.plugins.test_fsdp import Experts, Mixed, Numbers, Plain, Trained, assert_alike, samples, trained


class Outside(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(functional.linear(x, self[0].weight), self[2].weight)


class MixedLater(Mixed):
    """Does so from the second step on."""

    steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        hidden = torch.tanh(self.first(x))
        both = [layer(hidden) for layer in self.either]
        return self.out(torch.tanh(both[0 if self.steps == 1 else int(os.environ["RANK"])]))


class ExpertsLater(Experts):
    all_alike = 1


class KeepsWeights(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.kept = [self[2].weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + sum(weight.square().sum() for weight in self.kept)


class Normalises(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self[1](self[0](x))
        with torch.no_grad():
            self[0].weight.div_(2)
        return self[2](hidden)


class Renormalises(nn.Module):
    """Its embedding changes its rows as it looks them up."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(4, 8, max_norm=0.1), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.embedding((x > 0).long().sum(-1) % 4))


REFUSED: dict[str, tuple[type[nn.Module], str, dict[str, Any]]] = {
    "outside": (Outside, "adamw", {}),
    "mixed": (Mixed, "adamw", {}),
    "mixed later": (MixedLater, "adamw", {"zero": 2}),
    "optimizer": (Plain, "adafactor", {}),
    "unit": (Plain, "adamw", {"units": ["layers.*"]}),
    "experts": (Experts, "adamw", {"find_unused_parameters": True}),
    "experts later": (ExpertsLater, "adamw", {}),
    "kept": (KeepsWeights, "adamw", {}),
    "in place": (Normalises, "adamw", {"units": []}),
    "in place, gathered": (Renormalises, "adamw", {"zero": 1}),
}


def refused() -> dict[str, str]:
    said = {}
    for kind, (make, optimizer, arguments) in REFUSED.items():
        with pytest.raises(pf.ModelError) as caught:
            trained(make, (FSDP(2, **arguments),), optimizer)
        said[kind] = str(caught.value)
    return said


def test_what_cannot_be_sharded_is_refused_by_name(ranks: Any) -> None:
    sentences = {
        "outside": r"weight of a sharded unit was used outside of that unit's forward.*units are 0, 2",
        "mixed": r"either\.0\.weight, either\.0\.bias, either\.1\.weight, .*find_unused_parameters=True",
        "mixed later": r"on some ranks only: either\.0\.weight.*find_unused_parameters=True",
        "optimizer": "Adafactor divides by norms of whole rows and columns.*such as adamw",
        "unit": r"No module of Plain matches the unit 'layers\.\*'; there are 0 \(Linear\)",
        "experts": r"ran on some ranks only.*: either\.0, either\.1\..*FSDP\(units=\['first', 'out'\], find_unused",
        "experts later": r"ran on some ranks only.*: either\.0, either\.1\..*FSDP\(units=\['first', 'out'\]",
        "kept": r"computed from 2\.weight as kept elsewhere than in the module's own attribute.*self\.layer\.weight",
        "in place": r"^0\.weight changed in place within a step.*on_step_end",
        "in place, gathered": r"^embedding\.weight changed in place within a step",
    }
    for said in ranks(2, refused):
        assert said.keys() == sentences.keys()
        for kind, sentence in sentences.items():
            assert re.search(sentence, said[kind]), said[kind]


class Failing(Plain):
    where = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self[1](self[0](x))
        if self.where == "forward" and torch.is_grad_enabled():
            raise ArithmeticError("once")
        if self.where == "backward":
            hidden.register_hook(_fail)
        return self[2](hidden)


def _fail(*_: Any) -> None:
    raise ArithmeticError("once")


class FailsBetween(pf.Callback):
    """Fails in the second micro-batch of a step."""

    def __init__(self) -> None:
        self.begun = 0

    def on_micro_batch_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.begun += 1
        if self.begun == 2:
            _fail()


def failing_once() -> list[Trained]:
    results = []
    for where, zero in [("forward", 3), ("backward", 3), ("backward", 1), ("between", 1), ("between", 3), ("", 3)]:
        torch.manual_seed(1)
        model, numbers = Failing(), Numbers()
        model.where = where
        pf.configure(model, loss="cross_entropy", optimizer="sgd", lr=1e-2)
        callbacks = [numbers, *([FailsBetween()] if where == "between" else [])]
        plan = {"fsdp": 2, "zero": zero, "accumulate": 2, "clip_norm": math.inf}
        trainer = pf.Trainer(max_steps=2, seed=5, progress=False, callbacks=callbacks, **plan)
        if where:
            with pytest.raises(ArithmeticError):
                trainer.fit(model, samples(), batch_size=12)
        model.where = ""
        trainer.evaluate(model, samples(), batch_size=12)
        trainer.fit(model, samples(), batch_size=12)
        results.append((numbers.seen, {name: whole(v).clone() for name, v in model.state_dict().items()}))
    return results


def test_nothing_is_left_of_a_step_that_raised(ranks: Any) -> None:
    for *failed, reference in ranks(2, failing_once):
        for got in failed:
            assert_alike(got, reference)
