"""What is not finite is found before it reaches the weights, and named: step, rank, module, parameters, field."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import paraflow as pf
from paraflow.callbacks.nan_guard import NaNGuard
from tests.plugins.toy_shard import ToyShard
from tests.trainer.test_resume import assert_equal

BAD = 7.0  # a sample whose second number is this spoils what the module under test does with it


class Break(nn.Module):
    """Passes on what it is given, but for samples that are marked: their output is NaN, or minus infinity."""

    def __init__(self, value: float = float("nan")) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x[:, 1:2] == BAD, self.value, x)


class _SpoiltGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, marked: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(marked)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.where(ctx.saved_tensors[0], float("nan"), gradient), None


class Net(pf.Model):
    """Three layers; what breaks, and where, is said by ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.entry = (
            Break() if kind == "module" else Break(float("-inf")) if kind == "minus infinity" else nn.Identity()
        )
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.1))
        self.head = nn.Linear(4, 1)
        self.configure(optimizer="adamw", lr=0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(self.entry(x))
        return self.head(_SpoiltGradient.apply(h, (x[:, 1:2] == BAD).any()) if self.kind == "backward" else h)

    def training_step(self, batch: Any) -> torch.Tensor:
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        loss = functional.mse_loss(self(x), y)
        if self.kind == "loss":
            loss = loss * torch.where((x[:, 1] == BAD).any(), float("inf"), 1.0)
        return loss


def samples(bad: int | None = None, field: str | None = None) -> dict[str, torch.Tensor]:
    """Eight samples; one is marked, or its field is NaN."""
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    rows = {"x": x, "y": x.sum(1, keepdim=True)}
    if bad is not None:
        rows[field or "x"][bad, 1 if field != "y" else 0] = float("nan") if field else BAD
    return rows


class Keep(pf.Callback):
    """Keeps the state that the guard has to leave as it is."""

    def on_before_optimizer_step(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        module = trainer.engine.module
        self.state = {name: value.clone() for name, value in module.state_dict().items()}
        self.random = torch.get_rng_state()


def message(kind: str = "", field: str | None = None, bad: int = 5, shard: bool = False, **plan: Any) -> str:
    """What this rank's fit raises, where one of eight samples is bad, in step 2; two ranks have four samples each."""
    keep, net = Keep(), Net(kind)
    if shard:
        plan["plugins"] = [ToyShard(2)]
    trainer = pf.Trainer(seed=3, progress=False, callbacks=[keep, NaNGuard()], **plan)
    with pytest.raises(pf.ParaflowError) as raised:
        trainer.fit(net, [samples(), samples(bad, field)])
    assert type(raised.value) is pf.ParaflowError
    assert trainer.step == 1
    assert_equal(dict(net.state_dict()), keep.state)
    assert torch.equal(torch.get_rng_state(), keep.random)
    assert not any(part._forward_hooks for part in net.modules())
    assert net.training
    return str(raised.value)


CULPRITS = [
    ("module", None, "the output of entry (Break) is not finite, and its inputs are"),
    ("minus infinity", None, "the output of entry (Break) is not finite, and its inputs are"),
    ("", "x", "its data is not finite: batch['x']"),
    ("", "y", "its data is not finite: batch['y']"),
    ("loss", None, "its loss is inf, and the outputs of all modules are finite"),
    (
        "backward",
        None,
        "its forward is finite, and the gradients of body.1.bias, body.1.weight, body.0.bias and 1 more are not",
    ),
]


@pytest.mark.parametrize(("kind", "field", "expected"), CULPRITS)
def test_it_names_the_culprit_and_nothing_else(kind: str, field: str | None, expected: str) -> None:
    said = message(kind, field)
    assert re.match(r"The gradient of step 2 is not finite \(its norm is (nan|inf)\); the optimizer has not ste", said)
    assert f"It began on rank 0: {expected}. " in said


def messages(kinds: int, **options: Any) -> list[str]:
    """One world for many runs: a process group takes longer than they do."""
    return [message(kind, field, **options) for kind, field, _ in CULPRITS[:kinds]]


@pytest.mark.parametrize("rank", [0, 1])
def test_it_names_the_rank(ranks: Any, rank: int) -> None:
    """The gradients of all ranks are not finite then, and what they are clipped to neither."""
    said = ranks(2, messages, len(CULPRITS), bad=4 * rank + 1, clip_norm=1.0, accumulate=2)
    assert said[0] == said[1]
    for text, (_, _, expected) in zip(said[0], CULPRITS, strict=True):
        assert f"It began on rank {rank}: {expected}. " in text


def test_it_names_the_rank_where_parameters_are_sharded(ranks: Any) -> None:
    said = ranks(2, messages, 5, shard=True)
    assert said[0] == said[1]
    for text, (_, _, expected) in zip(said[0], CULPRITS[:5], strict=True):
        assert f"It began on rank 1: {expected}. " in text


def test_a_backward_with_sharded_parameters_names_the_parameters(ranks: Any) -> None:
    said = ranks(2, message, "backward", shard=True)
    assert said[0] == said[1]
    assert "It began on every rank: its part of the gradients of body.1.bias, body.1.weight, body.0.bias" in said[0]
    assert "head" not in said[0]


def test_the_innermost_module_is_named_and_what_holds_it_is_not() -> None:
    net = Net("")
    net.body[2] = nn.Sequential(nn.Identity(), Break())
    net.head = nn.Sequential(Break(), net.head)
    with torch.no_grad():
        net.body[1].weight.zero_()
        net.body[1].bias.fill_(BAD)
    trainer = pf.Trainer(progress=False, callbacks=[NaNGuard()])
    with pytest.raises(
        pf.ParaflowError, match=r"rank 0: the output of body\.2\.1 \(Break\) is not finite, and its inp"
    ):
        trainer.fit(net, [samples()])


@dataclass(frozen=True)
class Record:
    inputs: tuple[torch.Tensor, list[torch.Tensor]]
    name: str


class OfRecords(pf.Model):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.configure(optimizer="sgd", lr=0.1)

    def training_step(self, batch: Record) -> torch.Tensor:
        return self.layer(batch.inputs[1][0]).mean()


def test_fields_are_named_as_one_would_write_them() -> None:
    batch = Record((torch.zeros(2, 3), [torch.full((2, 3), float("inf"))]), "first")
    with pytest.raises(pf.ParaflowError, match=r"its data is not finite: batch\.inputs\[1\]\[0\]\. Look at these"):
        pf.Trainer(progress=False, callbacks=[NaNGuard()]).fit(OfRecords(), [batch])


def test_parameters_that_are_not_finite_already_are_named(ranks: Any) -> None:
    for said in ranks(2, of_parameters):
        assert "It began on every rank: it has parameters that are not finite already: head.bias. Go on from an" in said


def of_parameters() -> str:
    net = Net("")
    with torch.no_grad():
        net.head.bias.fill_(float("inf"))
    with pytest.raises(pf.ParaflowError) as raised:
        pf.Trainer(progress=False, callbacks=[NaNGuard()]).fit(net, [samples()])
    return str(raised.value)


class Sensitive(Net):
    """Its forward raises where a run would go on: only on one rank, and only when it is run again."""

    def __init__(self) -> None:
        super().__init__("module")
        self.runs = 0

    def training_step(self, batch: Any) -> torch.Tensor:
        self.runs += 1
        if self.runs > 1 and (batch["x"][:, 1] == BAD).any():
            raise RuntimeError("not twice")
        return super().training_step(batch)


def sensitive() -> str:
    with pytest.raises(pf.ParaflowError) as raised:
        pf.Trainer(progress=False, callbacks=[NaNGuard()]).fit(Sensitive(), [samples(5)])
    return str(raised.value)


def test_an_exception_in_the_second_run_is_part_of_what_all_ranks_say(ranks: Any) -> None:
    said = ranks(2, sensitive)
    assert said[0] == said[1]
    assert "It began on rank 1: its forward, run again, raised RuntimeError: not twice." in said[0]


def stopped() -> tuple[int, bool, list[str]]:
    net, keep = Net("module"), Keep()
    trainer = pf.Trainer(max_epochs=3, progress=False, callbacks=[keep, NaNGuard(action="stop")])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(net, [samples(), samples(5), samples(), samples()])
    parameters = {name for name, _ in net.named_parameters()}
    same = all(torch.equal(keep.state[name], net.state_dict()[name]) for name in parameters)
    return trainer.step, same, [str(warning.message) for warning in caught]


def test_it_can_stop_the_run_with_the_weights_of_the_step_before(ranks: Any) -> None:
    (step, same, said), other = ranks(2, stopped)
    assert (step, same) == other[:2] == (2, True)
    assert any("step 2 is not finite" in text and text.endswith("The run ends here.") for text in said)
    assert not any("step 2 is not finite" in text for text in other[2])


def test_it_looks_every_so_many_steps() -> None:
    trainer = pf.Trainer(progress=False, callbacks=[NaNGuard(every=3)])
    with pytest.raises(pf.ParaflowError, match=r"gradient of step 3 .*not finite already: .*Go on from an earlier"):
        trainer.fit(Net("module"), [samples(5), samples(), samples(), samples()])


def test_steps_that_fp16_leaves_out_are_not_its_business() -> None:
    trainer = pf.Trainer(progress=False, precision="fp16", callbacks=[NaNGuard()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Net("module"), [samples(5), samples()])
    assert trainer.step == 2


def test_bf16_runs_again_as_it_ran() -> None:
    assert "It began on rank 0: the output of entry (Break) is not finite" in message("module", precision="bf16")


def test_finite_runs_are_left_alone() -> None:
    """The same weights with and without it."""
    weights = []
    for callbacks in ([], [NaNGuard()], [NaNGuard(every=2, action="stop")]):
        net = Net("")
        pf.Trainer(max_epochs=2, progress=False, callbacks=callbacks).fit(net, [samples(), samples()])
        weights.append(dict(net.state_dict()))
    assert_equal(weights[0], weights[1])
    assert_equal(weights[0], weights[2])


def test_a_validation_loss_that_is_not_finite_is_warned_of() -> None:
    trainer = pf.Trainer(max_epochs=1, progress=False, callbacks=[NaNGuard()])
    with pytest.warns(UserWarning, match=r"validation loss after step 1 is nan"):
        trainer.fit(Net(""), [samples()], [samples(2, "x")])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"every": "1ep"}, "every so many steps: write 10 or '10st', not '1ep'"),
        ({"every": 0}, "0 is no interval"),
        ({"action": "warn"}, "action must be 'raise' or 'stop', not 'warn'"),
    ],
)
def test_arguments_of_another_kind_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        NaNGuard(**options)
