"""Parameters that come, go or get their shape after the model was made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import paraflow as pf


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(24, 6, generator=generator), torch.randint(0, 4, (24,), generator=generator)


class Numbers(pf.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.seen += [float(logs["loss"]), float(logs["grad_norm"])]


@pytest.mark.parametrize("change", ["trained", "frozen"])
def test_a_new_head_of_the_same_names_is_trained_like_a_new_model(change: str) -> None:
    seen = []
    for anew in (False, True):
        torch.manual_seed(1)
        model, numbers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)), Numbers()
        model[2].requires_grad_(change == "trained")
        pf.configure(model, loss="cross_entropy", optimizer="sgd", lr=0.1)
        make = lambda numbers=numbers: pf.Trainer(  # noqa: E731
            max_steps=3, seed=5, progress=False, callbacks=[numbers], clip_norm=1.0
        )
        trainer = make()
        trainer.fit(model, data(), batch_size=12)
        model[2] = nn.Linear(16, 4).requires_grad_(change == "trained")
        trainer = make() if anew else trainer
        trainer.fit(model, data(), batch_size=12)
        assert trainer.engine.parameters[-1] is (model[2].bias if change == "trained" else model[0].bias)
        seen.append([*numbers.seen, *model[2].weight.flatten().tolist()])
    assert seen[0] == seen[1]


def test_the_engine_of_a_model_that_stays_is_kept() -> None:
    model = pf.configure(nn.Linear(6, 4), loss="cross_entropy")
    trainer = pf.Trainer(max_steps=1, progress=False)
    trainer.fit(model, data(), batch_size=12)
    engine = trainer.engine
    trainer.fit(model, data(), batch_size=12)
    trainer.predict(model, data()[0])
    assert trainer.engine is engine


def test_what_has_no_shape_yet_is_refused_until_a_forward_has_given_it() -> None:
    model = pf.configure(nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()), loss="cross_entropy")
    for use in (lambda t: t.fit(model, data(), batch_size=12), lambda t: t.predict(model, data()[0])):
        with pytest.raises(pf.ModelError, match=r"0\.weight, 0\.bias, 1\.weight.* Run one before: model\(inputs\)"):
            use(pf.Trainer(max_steps=1, progress=False))
    model(data()[0])
    pf.Trainer(max_steps=1, progress=False).fit(model, data(), batch_size=12)


class Makes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> Any:
        if not hasattr(self, "out"):
            self.out = nn.Linear(8, 4)
        return self.out(self.first(x))


def test_parameters_that_the_first_step_makes_are_refused() -> None:
    model = pf.configure(Makes(), loss="cross_entropy")
    trainer = pf.Trainer(max_steps=1, progress=False)
    with pytest.raises(pf.ModelError, match=r"Makes made parameters in its first step \(out\.weight, out\.bias\)"):
        trainer.fit(model, data(), batch_size=12)
    trainer.fit(model, data(), batch_size=12)
    assert len(trainer.engine.parameters) == 4
