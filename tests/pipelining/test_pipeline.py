"""The pipeline as a plugin: what it refuses, and what runs look like under it on every rank."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paraflow as pf
from paraflow.models import CausalLM
from tests.parity.runs import whole_parameters
from tests.parity.test_pipeline import Deep, causal, samples, tokens

pytestmark = pytest.mark.parity

BATCH, COUNT = 6, 20


class Listener(pf.Callback):
    """What a callback sees, in order, and the numbers of each step."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.logs: list[dict[str, float]] = []

    def on_micro_batch_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.events.append("begin")

    def on_before_backward(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.events.append("before")

    def on_after_backward(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.events.append("after")

    def on_micro_batch_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.events.append("end")

    def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.logs.append({key: float(value) for key, value in logs.items()})


def fitted(model: nn.Module, data: Any, **arguments: Any) -> pf.Trainer:
    arguments = {"max_epochs": 1, "seed": 5, "progress": False, "pp": 2, "clip_norm": 1.0, **arguments}
    batch_size, resume = arguments.pop("batch_size", BATCH), arguments.pop("resume", None)
    trainer = pf.Trainer(**arguments)
    trainer.fit(model, data, batch_size=batch_size, resume=resume)
    return trainer


def seen_by_callbacks() -> list[Any]:
    found = []
    for arguments in ({"accumulate": 3}, {"accumulate": 2, "options": {"schedule": "zbv", "chunks": 2}}):
        options = arguments.pop("options", {})
        listener = Listener()
        plan = pf.Plan(pp=2, options={"pipeline": options}, **arguments)  # type: ignore[arg-type]
        trainer = fitted(Deep(), samples(COUNT), plan=plan, pp=2, callbacks=[listener])
        evaluated = trainer.evaluate(trainer.engine.module, samples(7), batch_size=3)
        predicted = trainer.predict(trainer.engine.module, samples(7)[0], batch_size=3)
        found.append((listener.events, listener.logs, evaluated, predicted, trainer.engine.forwards))
    return found


def test_every_rank_sees_the_same(ranks: Any) -> None:
    model = Deep()
    trainer = fitted(model, samples(COUNT), pp=1)
    expected = trainer.evaluate(model, samples(7), batch_size=3), trainer.predict(model, samples(7)[0], batch_size=3)
    first, second = ranks(2, seen_by_callbacks)
    for (events, logs, *results), (other_events, other_logs, *others) in zip(first, second, strict=True):
        micro_batches = events.count("begin")
        assert all(events.count(event) == micro_batches for event in ("before", "after", "end"))
        assert sorted(events) == sorted(other_events)
        assert logs == other_logs
        assert results[0] == others[0] == pytest.approx(expected[0], rel=1e-5)
        torch.testing.assert_close(results[1], expected[1], rtol=1e-5, atol=1e-6)
        assert torch.equal(results[1], others[1])


def drawing(schedule: str, chunks: int, folder: str) -> Any:
    """Two epochs with dropout, and the same with a stop and a resumption between them."""
    arguments = {
        "max_epochs": 2,
        "accumulate": 3,
        "plugins": [pf.plugins.Pipeline(2, schedule=schedule, chunks=chunks)],
    }
    data = tokens(COUNT)
    whole = fitted(causal(0.2), data, **arguments)
    checkpoint = pf.callbacks.Checkpoint(f"{folder}/{schedule}", every="1ep")
    fitted(causal(0.2), data, **arguments, max_steps=4, callbacks=[checkpoint])
    arguments["plugins"] = [pf.plugins.Pipeline(2, schedule=schedule, chunks=chunks)]
    again = fitted(causal(0.2), data, **arguments, resume=f"{folder}/{schedule}")
    return whole_parameters(whole), whole_parameters(again)


def test_dropout_is_the_same_under_every_order_and_after_a_resumption(ranks: Any, tmp_path: Path) -> None:
    parameters: list[dict[str, torch.Tensor]] = []
    for schedule in ("1f1b", "gpipe"):
        for whole, again in ranks(2, drawing, schedule, 1, str(tmp_path)):
            parameters.append(whole)
            assert all(torch.equal(whole[name], again[name]) for name in whole)
    without = whole_parameters(fitted(causal(0.0), tokens(COUNT), pp=1, max_epochs=2))
    for name, value in parameters[0].items():
        assert all(torch.equal(value, other[name]) for other in parameters)
    assert any(not torch.allclose(value, without[name], rtol=1e-3) for name, value in parameters[0].items())


def in_half_precision() -> Any:
    found = {}
    for precision in ("fp16", "bf16"):
        model = causal()
        trainer = fitted(model, tokens(COUNT), precision=precision, accumulate=2, max_epochs=2)
        found[precision] = whole_parameters(trainer), trainer.engine.state_dict()["plugins"]
    return found


def test_half_precision_agrees_on_every_stage(ranks: Any) -> None:
    reference = whole_parameters(fitted(causal(), tokens(COUNT), pp=1, accumulate=2, max_epochs=2))
    first, second = ranks(2, in_half_precision)
    assert first["fp16"][1] == second["fp16"][1]
    for precision, bound in (("fp16", 1e-2), ("bf16", 8e-2)):
        for name, value in reference.items():
            assert (first[precision][0][name] - value).abs().max() < bound, (precision, name)


def overflowing() -> tuple[float, bool]:
    """The first stage's gradients overflow in fp16, those of the last do not."""
    trainer = fitted(
        Deep(), samples(4), plugins=[pf.plugins.Precision("fp16", initial_scale=2.0**40)], max_steps=1, batch_size=4
    )
    before = dict(Deep().named_parameters())
    same = all(torch.equal(p, before[name]) for name, p in trainer.engine.module.named_parameters())
    return trainer.engine.state_dict()["plugins"]["precision"]["scale"], same


def test_a_step_that_overflows_anywhere_is_left_out_everywhere(ranks: Any) -> None:
    assert ranks(2, overflowing) == [(2.0**39, True)] * 2


class Vision(pf.Model):
    """A token of its own beside the units, statistics, and perhaps a frozen first half."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem = nn.Linear(6, 8)
        self.token = nn.Parameter(torch.randn(8))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 4)
        self.stem.requires_grad_(not frozen)
        self.blocks[:2].requires_grad_(not frozen)
        self.token.requires_grad_(not frozen)
        self.configure(optimizer="sgd", lr=0.1, loss="cross_entropy", metrics=["accuracy"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x) + self.token
        for block in self.blocks:
            x = x + block(x) * self.token
        return self.head(x)


def vision(frozen: bool) -> dict[str, torch.Tensor]:
    return whole_parameters(fitted(Vision(frozen=frozen), samples(22), accumulate=2))


@pytest.mark.parametrize("frozen", [False, True])
def test_what_belongs_to_no_unit_is_trained_as_one(ranks: Any, frozen: bool) -> None:
    expected = whole_parameters(fitted(Vision(frozen=frozen), samples(22), pp=1, accumulate=2))
    for found in ranks(2, vision, frozen):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


class Hidden(CausalLM):
    """Uses the table in a way that its code does not show."""

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        table = dict(self.named_modules())["embedding"]
        return nn.functional.linear(self.norm(hidden), table.weight)


def hidden(shared: tuple[str, ...]) -> Any:
    model = Hidden(causal().config).configure(optimizer="sgd", lr=0.1)
    plugins = [pf.plugins.Pipeline(2, shared=shared)]
    try:
        return whole_parameters(fitted(model, tokens(COUNT), plugins=plugins))
    except pf.ModelError as error:
        return str(error)


def test_a_use_that_code_does_not_show_is_refused_with_what_to_write(ranks: Any) -> None:
    for said in ranks(2, hidden, ()):
        assert "embedding.weight is used outside of its own module, by stage 1" in said
        assert "shared=['embedding.weight']" in said
    parameters = ranks(2, hidden, ("embedding.weight",))
    assert all(torch.equal(value, parameters[1][name]) for name, value in parameters[0].items())


def deferred() -> Any:
    torch.manual_seed(0)
    with pf.deferred_init():
        model = causal()
    trainer = fitted(model, tokens(COUNT), accumulate=2)
    held = sum(p.numel() for p in trainer.engine.module.parameters())
    return whole_parameters(trainer), held, trainer.engine.mesh.coordinate("pp")


def test_what_another_stage_holds_is_never_made(ranks: Any) -> None:
    expected = whole_parameters(fitted(causal(), tokens(COUNT), pp=1))
    total = sum(value.numel() for value in expected.values())
    for found, held, _ in ranks(2, deferred):
        assert held < 0.75 * total
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def going_on(folder: str, degree: int, last: int, resume: bool) -> dict[str, torch.Tensor]:
    """Trains with an optimizer that was made before the model was laid out; saves at the end."""
    model = causal()
    model.configure(optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), metrics=["accuracy"])
    arguments = {"pp": degree, "max_steps": last, "max_epochs": 4, "resume": folder if resume else None}
    checkpoint = pf.callbacks.Checkpoint(folder, every="1ep")
    return whole_parameters(fitted(model, tokens(COUNT), **arguments, callbacks=[checkpoint], debug=True))


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2)])
def test_a_run_goes_on_under_another_plan(ranks: Any, tmp_path: Path, first: int, second: int) -> None:
    expected = going_on(str(tmp_path / "whole"), 1, 8, False)
    ranks(first, going_on, str(tmp_path / "cut"), first, 4, False)
    for found in ranks(second, going_on, str(tmp_path / "cut"), second, 8, True):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def seeded_apart() -> str:
    torch.manual_seed(int(os.environ["RANK"]))
    with pf.deferred_init():
        model = nn.Sequential(nn.Linear(6, 1000), nn.Tanh(), nn.Linear(1000, 6))
    pf.configure(model, loss="cross_entropy")
    with pytest.raises(pf.ModelError, match="seeded differently") as error:
        fitted(model, samples(COUNT))
    return str(error.value)


def test_stages_of_models_that_were_seeded_apart_are_refused(ranks: Any) -> None:
    assert len(ranks(2, seeded_apart)) == 2


def again() -> list[str]:
    model, said = Deep(), []
    first = fitted(model, samples(COUNT), max_epochs=1)
    state = copy.deepcopy(model).state_dict()
    assert state.keys() == pickle.loads(pickle.dumps(model)).state_dict().keys() == model.state_dict().keys()
    with pytest.raises(pf.ModelError, match=r"body\.\d was called outside of a step, .* on another rank"):
        model(samples(2)[0])
    before = whole_parameters(first)
    second = fitted(model, samples(COUNT), max_epochs=1)
    assert any(not torch.equal(value, before[name]) for name, value in whole_parameters(second).items())
    for plan in ({"plugins": [pf.plugins.Pipeline(2, stages=["body.2"])]}, {"pp": 1, "dp": 2}):
        try:
            fitted(model, samples(COUNT), **plan)
        except pf.ModelError as error:
            said.append(str(error))
    return said


def test_a_model_is_trained_again_under_the_same_stages_only(ranks: Any) -> None:
    for said in ranks(2, again):
        assert len(said) == 2
        assert all("earlier Trainer" in text for text in said), said


def given_apart() -> list[Any]:
    """Trains with costs of each rank's own, and returns what is said of other things that differ."""
    rank, found = int(os.environ["RANK"]), list[Any]()
    costs = {f"body.{place}": 1.0 + 9.0 * ((place > 6) == bool(rank)) for place in range(0, 16, 2)}
    found.append(whole_parameters(fitted(Deep(), samples(COUNT), plugins=[pf.plugins.Pipeline(2, costs=costs)])))
    longer = Deep()
    longer.body.extend([nn.Linear(4, 4)] if rank else [])
    for model, arguments in (
        (Deep(), {"stages": [f"body.{2 + 2 * rank}"]}),
        (Deep(), {"stages": ["body.99"] if rank else None}),
        (Deep(), {"shared": ("body.0.*",) if rank else ()}),
        (longer, {}),
        (Deep() if rank else nn.Sequential(nn.Linear(6, 4)), {}),
    ):
        plugins = [pf.plugins.Pipeline(2, **arguments)]  # type: ignore[arg-type]
        with pytest.raises(pf.ModelError) as error:
            fitted(pf.configure(model, loss="cross_entropy"), samples(COUNT), plugins=plugins)
        found.append(str(error.value))
    return found


def test_ranks_cut_in_the_same_stages_or_all_refuse(ranks: Any) -> None:
    expected = whole_parameters(fitted(Deep(), samples(COUNT), pp=1))
    first, second = ranks(2, given_apart)
    for found, *said in (first, second):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert all("different pipelines: rank 0 has stages=" in text for text in said[:2])
        assert "rank 0 has shared=[], and rank 1 has shared=['body.0.*']" in said[2]
        assert "different stages: rank 0 has body.0 " in said[3]
        assert "Build the same model on every rank" in said[3]
    assert "units" in first[-1], "what the rank itself has found"
    assert "rank 0 raised an error" in second[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"plugins": [pf.plugins.Pipeline(2, schedule="2f2b")]}, r"\[pipeline-schedule-unknown\].*'1f1b'"),
        ({"plugins": [pf.plugins.Pipeline(2, schedule="zbv")]}, r"\[pipeline-chunks\].*chunks=2"),
        ({"pp": 2, "compile": True}, r"\[pipeline-compile\]"),
        ({"pp": 2, "activation_checkpointing": "auto"}, r"\[auto-recompute-runner\]"),
        ({"pp": 2, "apply_groups": "backward"}, "pipeline"),
    ],
)
def test_what_cannot_run_is_refused_before_it_starts(
    arguments: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setitem(os.environ, name, value)
    with pytest.raises(pf.PlanError, match=said):
        pf.Trainer(progress=False, **arguments).fit(Deep(), samples(COUNT), batch_size=BATCH)


def test_stages_are_names_or_lists_of_names() -> None:
    with pytest.raises(pf.PlanError, match="stages must be the module names of each stage"):
        pf.plugins.Pipeline(2, stages=[1, 2])  # type: ignore[list-item]
    plan = pf.Plan(pp=2, options={"pipeline": {"stages": [["a"], ["b", "c"]], "schedule": "gpipe"}})
    from paraflow.plugins.registry import plugins_of

    (plugin,) = [plugin for plugin in plugins_of(plan) if plugin.name == "pipeline"]
    assert plugin.describe() == "pipeline over 2 ranks, schedule 'gpipe'"
