"""What a step draws and keeps outside of the layers: the same on every stage, and as in one process."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paraflow as pf
from paraflow.mesh import Mesh
from paraflow.pipelining.orders import Schedule
from paraflow.pipelining.randomness import Randomness
from paraflow.pipelining.replay import Replay
from paraflow.pipelining.stage_state import StageState
from paraflow.pipelining.traces import Traces, form_of
from tests.parity.runs import whole_parameters
from tests.parity.tasks import samples

SCHEDULES = [("1f1b", 1), ("zbv", 2)]


class Jittered(nn.Linear):
    """A layer that draws numbers of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.9 + 0.1 * random.random() + 0.1 * float(np.random.rand()))


class Mixing(pf.Model):
    """Draws with every generator, outside of layers and in them; counts before the first layer and after the last."""

    before: Tensor
    after: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        sizes = (6, 16, 16, 16, 16, 4)
        self.body = nn.ModuleList(Jittered(a, b) for a, b in pairwise(sizes))
        self.drop = 0.25
        self.generator, self.own, self.seen = random.Random(3), 0.0, list[Any]()
        self.calls, self.ended = 0, 0
        self.register_buffer("before", torch.zeros(()))
        self.register_buffer("after", torch.zeros(()))
        self.configure(optimizer="sgd", lr=0.1)

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        self.calls += 1
        self.before += 1
        lam = float(np.random.beta(1.0, 1.0))
        drawn = [lam, random.random(), float(torch.distributions.Beta(1.0, 1.0).sample())]
        order = torch.randperm(len(x))
        for place, layer in enumerate(self.body):
            x = F.dropout(torch.tanh(layer(x)), self.drop)
            if place == 0:
                drawn += [random.random(), float(torch.rand(()))]  # between layers
        loss = lam * F.cross_entropy(x, y) + (1 - lam) * F.cross_entropy(x, y[order])
        self.seen.append(tuple(drawn))
        self.ended += 2
        self.after += 2
        self.own = self.generator.random()
        return loss


def mixed(folder: str) -> list[Any]:
    def run(schedule: str, chunks: int, **arguments: Any) -> tuple[Mixing, dict[str, Tensor]]:
        model = Mixing()
        plugins = [pf.plugins.Pipeline(2, schedule=schedule, chunks=chunks)] if chunks else []
        resume = arguments.pop("resume", None)
        trainer = pf.Trainer(max_epochs=2, seed=5, progress=False, accumulate=3, plugins=plugins, **arguments)
        trainer.fit(model, samples(24), batch_size=12, resume=resume)
        return model, whole_parameters(trainer)

    found = []
    for schedule, chunks in SCHEDULES:
        model, whole = run(schedule, chunks)
        counts = model.calls, model.ended, float(model.before), float(model.after), model.own
        found.append((model.seen, counts))
    run(schedule, chunks, max_steps=2, callbacks=[pf.callbacks.Checkpoint(folder, every="1ep")])
    resumed, again = run(schedule, chunks, resume=folder)
    same = all(torch.equal(value, again[name]) for name, value in whole.items())
    return [*found, (resumed.seen, same)]


def test_what_a_step_draws_and_counts_is_alike_on_every_stage(ranks: Any, tmp_path: Path) -> None:
    generator = random.Random(3)
    own = [generator.random() for _ in range(12)][-1]
    first, second = ranks(2, mixed, str(tmp_path))
    assert first == second
    *runs, (resumed, same) = first
    for seen, counts in runs:
        assert seen == runs[0][0], "whatever the schedule"
        assert len(set(seen)) == 12, "each micro-batch draws its own"
        assert counts == (12, 24, 12.0, 24.0, own)
    assert resumed == runs[0][0][6:]
    assert same, "resumed to the bit"


class Noting(nn.Module):
    """Two layers, and a note that a test takes after them."""

    def __init__(self, note: Any) -> None:
        super().__init__()
        self.first, self.second, self.note = nn.Linear(6, 4), nn.Linear(4, 4), note
        self.calls, self.kept = 0, list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.second(self.first(x))
        self.note(self, x, y)
        return y


def _an_object(m: Any, x: Tensor, y: Tensor) -> None:
    m.calls = object()


def _sometimes(m: Any, x: Tensor, y: Tensor) -> None:
    if m.calls == 3:
        m.scale = 2.0


def _of_layers(m: Any, x: Tensor, y: Tensor) -> None:
    m.last = y.detach().mean()


def _tensors(m: Any, x: Tensor, y: Tensor) -> None:
    m.kept.append(x.mean())
    m.largest = x.max() if m.calls == 1 else torch.maximum(x.max(), m.largest)
    m.note_taken = {"calls": (m.calls, "x"), "shape": tuple(x.shape)}


def noted() -> list[Any]:
    found: list[Any] = []
    for note in (_tensors, _of_layers, _an_object):
        model = pf.configure(Noting(note), optimizer="sgd", lr=0.1, loss="cross_entropy")
        plugins = [pf.plugins.Pipeline(2, stages=[["first"], ["second"]])]
        try:
            pf.Trainer(max_epochs=1, seed=5, progress=False, plugins=plugins).fit(model, samples(24), batch_size=6)
        except pf.ModelError as error:
            found.append(str(error))
        else:
            found.append([getattr(model, name, None) for name in ("calls", "kept", "largest", "note_taken")])
    return found


def test_what_is_written_after_the_last_layer_is_given_to_all(ranks: Any) -> None:
    model = pf.configure(Noting(_tensors), optimizer="sgd", lr=0.1, loss="cross_entropy")
    pf.Trainer(max_epochs=1, seed=5, progress=False).fit(model, samples(24), batch_size=6)
    for written, of_layers, refused in ranks(2, noted):
        assert written == [4, model.kept, model.largest, model.note_taken]
        assert of_layers == [4, [], None, None]
        assert "'calls' is given an object after the layers of an earlier stage" in refused
        assert "Keep those, or write it before the first layer is called" in refused


@dataclass
class Alone:
    """One of two ranks along the pipeline, by itself: the last one, if not said otherwise."""

    place: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def coordinate(self, dim: str) -> int:
        return self.place


def test_what_a_trace_did_not_show_is_refused() -> None:
    model, x = Noting(_sometimes), torch.randn(5, 6)
    replay = Replay(model, [["first"], ["second"]])
    state = StageState(replay, cast("Mesh", Alone()), Schedule("1f1b", 2))
    traffic = replay.trace(lambda: model(x))
    state.expect(traffic, lambda: model(x))
    for _ in range(2):
        with state.step(), state.stage(1):
            replay.run(1, lambda: model(x), [torch.randn(5, 4)], traffic)
    said = r"'scale' is written after the layers .* was not when the step was traced"
    with pytest.raises(pf.ModelError, match=said), state.step(), state.stage(1):
        replay.run(1, lambda: model(x), [torch.randn(5, 4)], traffic)


class Surprised(nn.Module):
    """Four layers, before which some batches are noted, in place."""

    hits: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.register_buffer("hits", torch.zeros(2))
        self.register_buffer("mask", torch.ones(6))
        self.seen, self.table, self.generator = list[float](), {"n": [0]}, random.Random(3)
        self.sums, self.pair = [torch.zeros(2)], (torch.zeros(()), 1)

    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 10:
            self.hits[0].add_(1)
            self.seen.append(float(x.max()))
            self.table["n"][0] += 1
            self.sums[0].add_(x.sum())
            self.pair[0].add_(1)
            self.generator.random()
        if not hasattr(self, "least") or x.min() < self.least:
            self.least = x.min()
        for layer in self.layers:
            x = layer(x * self.mask)
        return x


def test_what_a_trace_did_not_show_is_written_once_where_a_rank_has_several_stages() -> None:
    model, whole = Surprised(), Surprised()
    replay = Replay(model, [[f"layers.{place}"] for place in range(4)])
    state = StageState(replay, cast("Mesh", Alone(0)), Schedule("zbv", 2, 2))
    batches = [torch.full((5, 6), value) for value in (1.0, 11.0, 2.0, 12.0, 13.0, 3.0)]
    traffic = replay.trace(lambda: model(batches[0]))
    state.expect(traffic, lambda: model(batches[0]))
    for step in range(0, len(batches), 3):
        with state.step():
            for stage in (0, 3):
                for x in batches[step : step + 3]:
                    received = [torch.randn(5, 6)] if stage else []
                    with state.stage(stage):
                        replay.run(stage, partial(model, x), received, traffic)
        for x in batches[step : step + 3]:
            whole(x)
        assert torch.equal(model.hits, whole.hits)
        assert (model.seen, model.table, model.least) == (whole.seen, whole.table, whole.least)
        torch.testing.assert_close((model.sums, model.pair), (whole.sums, whole.pair), rtol=0, atol=0)
        assert model.generator.getstate() == whole.generator.getstate()
    assert whole.seen == [11.0, 12.0, 13.0]


def _counts_again(m: Any, x: Tensor, y: Tensor) -> None:
    m.calls += 1


@pytest.mark.parametrize(("note", "refused"), [(_counts_again, True), (_tensors, False), (_of_layers, False)])
def test_what_a_micro_batch_reads_too_early_is_refused(note: Any, refused: bool) -> None:
    model, x = Noting(note), torch.randn(5, 6)
    replay = Replay(model, [["first"], ["second"]])
    state = StageState(replay, cast("Mesh", Alone()), Schedule("1f1b", 2))
    state.expect(replay.trace(lambda: model(x)), lambda: model(x))
    state.require_settled(1)
    assert (model.calls, model.kept) == (0, [])
    if refused:
        with pytest.raises(pf.ModelError, match=r"'calls' is written after the layers .* accumulate=1"):
            state.require_settled(2)
    else:
        state.require_settled(2)


def _prepares(m: Any) -> None:
    if not m.ready:
        m.offset.fill_(2.0)
        m.names.append("offset")
        m.ready, m.helper = True, object()


def test_a_trace_takes_back_what_a_model_notes_of_itself() -> None:
    model: Any = Noting(lambda m, x, y: _prepares(m))
    model.ready, model.names, model.helper = False, list[str](), None
    model.register_buffer("offset", torch.zeros(()))
    replay, x = Replay(model, [["first"], ["second"]]), torch.randn(5, 6)
    traffic = replay.trace(lambda: model(x))
    assert (model.ready, model.names, float(model.offset), model.calls) == (False, [], 0.0, 0)
    assert {place[1]: written.stage for place, written in traffic.state.items()} == {
        "calls": 0,
        "ready": 1,
        "names": 1,
        "helper": 1,
        "offset": 1,
    }


@pytest.mark.parametrize(
    ("look", "count"),
    [
        (lambda batch, x: x, 2),  # a trace, and one that cannot look
        (lambda batch, x: x * (2 if batch["id"][0] == "a1" else 1), 4),
        (lambda batch, x: x[:, : batch["length"]], 4),
        (lambda batch, x: x.reshape(-1, *([6] * (1 + 0 * int(batch["length"])))), 4),
    ],
)
def test_names_in_a_batch_tell_forms_apart_where_the_step_looks_at_them(look: Any, count: int) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))
    replay, traced = Replay(model, [["0"], ["1"]]), list[Any]()

    def call(batch: Any) -> Any:
        traced.append(batch)
        x = look(batch, batch["x"])
        return model(F.pad(x, (0, 6 - x.shape[1])))

    traces = Traces(replay, model, lambda traffic, again: None)
    found = [
        traces.of("step", {"x": torch.randn(2, 6), "id": [f"a{i}", "b"], "length": 3 + i, "on": True}, call)
        for i in (0, 1, 2, 0)
    ]
    assert len(traced) == count
    assert found[0] is found[3]
    assert (found[0] is found[1]) == (count == 2)


def test_what_only_some_stages_draw_is_their_own() -> None:
    model = nn.Sequential(Jittered(6, 4), Jittered(4, 4))
    x, drawn = torch.randn(5, 6), list[list[float]]()
    replay, randomness = Replay(model, [["0"], ["1"]]), Randomness(torch.device("cpu"))

    def step() -> Tensor:
        drawn.append([random.random()])
        y = model[1](F.dropout(model[0](x), 0.5))
        drawn[-1] += [random.random(), float(np.random.randn()), float(torch.rand(()))]
        return cast("Tensor", y)

    traffic = replay.trace(step)
    named = {event.name: (event.draws, event.draws_others) for event in traffic.events}
    assert named == {"0": (True, True), "dropout": (True, False), "1": (True, True)}
    replay.own_part = randomness.own_part
    outside, drawn[:] = random.getstate(), []
    with randomness.micro_batch(0, 0):
        (received,) = replay.run(0, step, [], traffic).tensors
    results = list[Any]()
    for stage in (1, 1):
        with randomness.micro_batch(stage, 0):
            results.append(replay.run(stage, step, [received.detach()], traffic))
    assert torch.equal(results[0], results[1])
    assert drawn == [drawn[0], drawn[1], drawn[1]]
    assert drawn[0] == drawn[1][:1], "the first stage is left where the second begins"
    assert random.getstate() == outside


def test_what_a_step_returns_of_its_batch_is_of_that_batch() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))
    traces = Traces(Replay(model, [["0"], ["1"]]), model, lambda traffic, again: None)
    for name in ("a", "b", "a"):
        batch = {"x": torch.randn(2, 6), "id": [name]}
        traffic = traces.of("step", batch, lambda batch: (model(batch["x"]), batch["id"]))
        assert traffic.returned[1] == [name]


def test_arrays_are_told_apart_by_shape() -> None:
    assert form_of(np.zeros(2)) == form_of(np.ones(2)) != form_of(np.zeros(3))
