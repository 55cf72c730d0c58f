"""The plugin: random numbers, resuming, models without memory, optimizers, and what is refused."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paraflow as pf
from paraflow.compatibility.table import judge
from paraflow.parts import whole
from paraflow.plugins.tensor_parallel import warning_across_hosts
from paraflow.tensor_parallel.dropout import OwnStream
from tests.tensor_parallel.models import BATCH, causal_lm, classes, classifier, encoder, rows

SHARES = {"sequence_parallel": True}


def trained(model: nn.Module, data: Any, options: dict[str, Any] | None = None, **plan: Any) -> dict[str, torch.Tensor]:
    """The parameters after one epoch, whole."""
    torch.manual_seed(0)
    plugins = [pf.plugins.TensorParallel(2, **(options or {}))]
    trainer = pf.Trainer(**{"max_epochs": 1, **plan}, progress=False, plugins=plugins)
    trainer.fit(model, data, batch_size=BATCH)
    return {key: whole(value).clone() for key, value in trainer.engine.state_dict()["model"].items()}


def dropped(model: nn.Module, data: Any, names: list[str], **options: Any) -> dict[str, torch.Tensor]:
    """Where dropout layers gave zero in the first forward of a training, and the parameters after it."""
    zeros: dict[str, torch.Tensor] = {}
    for name in names:

        def note(layer: nn.Module, args: Any, output: torch.Tensor, name: str = name) -> None:
            if layer.training:  # and not while a split is checked
                zeros.setdefault(name, output == 0)

        model.get_submodule(name).register_forward_hook(note)
    return {**trained(model, data, options), **zeros}


def dropouts() -> list[dict[str, torch.Tensor]]:
    names = [f"encoder.layers.0.{name}" for name in ("dropout", "dropout1", "dropout2")]
    block = ["dropout", "blocks.0.dropout", "blocks.1.dropout"]
    return [
        dropped(encoder(dropout=0.5), classes(5, 7, 32), names),
        dropped(causal_lm(dropout=0.5), rows(), block),
        dropped(causal_lm(dropout=0.5), rows(), block, **SHARES),
        trained(causal_lm(dropout=0.3), rows(), activation_checkpointing="full"),
        trained(causal_lm(dropout=0.3), rows()),
        trained(causal_lm(dropout=0.3), rows(), SHARES, activation_checkpointing="full"),
        trained(causal_lm(dropout=0.3), rows(), SHARES),
    ]


def test_dropout_is_alike_where_activations_are_and_differs_where_they_do(ranks: Any) -> None:
    first, second = ranks(2, dropouts)
    own = {(0, "encoder.layers.0.dropout"), (2, "blocks.0.dropout"), (2, "blocks.1.dropout")}
    for at, (mine, theirs) in enumerate(zip(first, second, strict=True)):
        for name, value in mine.items():
            assert torch.equal(value, theirs[name]) == ((at, name) not in own), (at, name)
    for again, once in ((3, 4), (5, 6)):  # what runs again in backward drops what it dropped before
        assert all(torch.equal(first[again][name], value) for name, value in first[once].items())


def test_a_stream_ends_where_it_began() -> None:
    def drawn(place: int, draws: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        stream = OwnStream(place, torch.device("cpu"))
        stream.begin()
        stream.begin()
        inside = torch.rand(draws)
        stream.end()
        stream.end()
        return inside, torch.rand(3)

    assert not torch.equal(drawn(0, 4)[0], drawn(1, 4)[0])
    assert torch.equal(drawn(0, 4)[0], drawn(0, 4)[0])
    assert torch.equal(drawn(0, 4)[1], drawn(1, 9)[1])
    torch.manual_seed(1)
    nothing = torch.rand(3)
    assert torch.equal(drawn(1, 0)[1], nothing)  # as if it had never begun
    assert not torch.equal(drawn(1, 1)[1], nothing)


def run(folder: str, steps: int, resume: bool, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    callbacks = [pf.callbacks.Checkpoint(folder, every=1), pf.callbacks.EMA(0.9)]
    plugins = [pf.plugins.TensorParallel(2, **options)]
    trainer = pf.Trainer(max_steps=steps, progress=False, callbacks=callbacks, plugins=plugins)
    trainer.fit(causal_lm(dropout=0.2), rows(), batch_size=BATCH, resume=folder if resume else None)
    state = trainer.engine.state_dict()
    return {key: whole(value).clone() for key, value in state["model"].items()}


def resumed(folder: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    pairs = []
    for name, options in (("plain", {}), ("shares", SHARES)):
        through = run(f"{folder}/{name}/through", 5, resume=False, **options)
        run(f"{folder}/{name}/broken", 2, resume=False, **options)
        pairs.append((through, run(f"{folder}/{name}/broken", 5, resume=True, **options)))
    return pairs


def test_a_resumed_run_is_bit_equal(ranks: Any, tmp_path: Path) -> None:
    for through, again in [pair for pairs in ranks(2, resumed, str(tmp_path)) for pair in pairs]:
        assert all(torch.equal(again[name], value) for name, value in through.items())


def deferred(make: str, **sizes: Any) -> nn.Module:
    pf.seed(7)
    with pf.deferred_init():
        return {"causal": causal_lm, "classifier": classifier}[make](**sizes)


def used() -> dict[str, Any]:
    """What else is done with a split model."""
    found: dict[str, Any] = {}
    model = deferred("causal", tied=False)
    assert next(model.parameters()).is_meta
    found["deferred"] = trained(model, rows())
    found["in memory"] = trained(causal_lm_seeded(), rows())
    trainer = pf.Trainer(max_epochs=1, progress=False, tp=2)
    split = classifier(1_003)
    x, y = classes(1_003, 6)
    trainer.fit(split, (x, y), batch_size=BATCH)
    found["evaluated"] = trainer.evaluate(split, (x, y))
    found["predicted"] = trainer.predict(split, x)
    parameters = {name: whole(p.detach()) for name, p in split.named_parameters()}
    found["by hand"] = torch.func.functional_call(classifier(1_003), parameters, (x,))
    found["said"] = trainer.engine.plugins[0].describe()
    found["held"] = {type(held.tensor) for held in trainer.engine.update.held}
    return found


def causal_lm_seeded() -> nn.Module:
    pf.seed(7)
    return causal_lm(tied=False)


def test_a_split_model_is_used_like_a_whole_one(ranks: Any) -> None:
    for found in ranks(2, used):
        assert all(torch.equal(found["deferred"][name], value) for name, value in found["in memory"].items())
        torch.testing.assert_close(found["predicted"], found["by hand"].detach())
        assert found["evaluated"].keys() == {"loss", "accuracy"}
        assert found["said"] == "tensor parallel over 2 ranks: 1 layers split, with 99% of the parameters"
        assert found["held"] == {nn.Parameter}


def different_everywhere() -> torch.Tensor:
    """Ranks that were seeded differently start from the first one's values."""
    import torch.distributed as dist

    model = pf.models.Classifier(pf.models.ClassifierConfig(inputs=6, classes=10, hidden=(8,)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(int(os.environ["RANK"]) + 1))
    trainer = pf.Trainer(max_epochs=1, progress=False, plugins=[pf.plugins.TensorParallel(2)], dp=2)
    trainer.fit(pf.configure(model, optimizer="sgd", lr=1e-9), classes(10, 6), batch_size=BATCH)
    assert dist.get_world_size() == 4
    return torch.cat([whole(p.detach()).flatten() for p in model.parameters()])


def test_all_ranks_start_from_the_first_ones_values(ranks: Any) -> None:
    for values in ranks(4, different_everywhere):
        assert torch.equal(values, torch.ones_like(values))


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.layer = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.norm(x))


def refusals() -> list[str]:
    said = []
    three = pf.models.Classifier(pf.models.ClassifierConfig(inputs=6, classes=10, hidden=(8, 9)))
    jobs: list[tuple[nn.Module, Any, dict[str, Any], dict[str, Any]]] = [
        (Whole(), classes(5, 6), {}, {}),
        (Whole(), classes(5, 6), {"plan": {"layer": "colwise"}}, {}),
        (causal_lm(hidden=8, heads=1), rows(), {}, {}),
        (causal_lm(), rows()[:, :8], SHARES, {}),
        (encoder(), classes(5, 7, 32), SHARES, {}),
        (three, classes(10, 6), {}, {"optimizer": "adafactor"}),
    ]
    for model, data, options, recipe in jobs:
        if recipe or isinstance(model, Whole):
            pf.configure(model, loss="cross_entropy", **recipe)
        try:
            trained(model, data, options)
            said.append("nothing")
        except pf.ParaflowError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_what_cannot_be_is_refused_with_the_remedy(ranks: Any) -> None:
    for said in ranks(2, refusals):
        assert "nothing in Whole is known to be splittable" in said[0]
        assert "layer has 5 outputs, which tp=2 does not divide" in said[1]
        assert "1 heads, which tp=2 ranks cannot share out" in said[2]
        assert "hidden states of shape (4, 7, 32)" in said[3]
        assert "Pad sequences to a multiple of 2" in said[3]
        assert "takes a ModuleList or Sequential of blocks" in said[4]
        assert "Adafactor divides by norms of whole rows" in said[5]


class Penalised(Whole):
    """Adds a penalty on all weights to its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1_001)

    def training_step(self, batch: Any) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        return loss + 1e-3 * sum(parameter.pow(2).sum() for parameter in self.parameters())


def refused(run: Any) -> str:
    try:
        run()
    except pf.ParaflowError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def again() -> dict[str, Any]:
    """Runs of a model that an earlier Trainer has split, and of one with a penalty."""
    model, data = causal_lm(tied=False), rows()
    once = trained(model, data)
    quiet = {"max_epochs": 1, "progress": False}
    losses = [pf.Trainer(**quiet, tp=2).evaluate(one, data)["loss"] for one in (model, copy.deepcopy(model))]
    return {
        "again": trained(model, data),
        "once": once,
        "losses": losses,
        "other": refused(lambda: trained(model, data, {"plan": {"blocks.0.mlp.up": "replicate"}})),
        "whole": refused(lambda: pf.Trainer(**quiet, dp=2).fit(model, data)),
        "penalty": refused(lambda: trained(pf.configure(Penalised()), classes(1_001, 6))),
    }


def test_a_split_model_is_taken_up_by_another_trainer_with_the_same_plan(ranks: Any) -> None:
    first, second = ranks(2, again)
    for found in (first, second):
        assert found["losses"][0] == found["losses"][1]
        assert "split by an earlier Trainer, with TensorParallel(2), and this one asks for Tensor" in found["other"]
        assert "spread over ranks by an earlier Trainer" in found["whole"]
        assert "training_step used the weight of a split layer outside" in found["penalty"]
        assert "weight_decay" in found["penalty"]
    for name, value in first["again"].items():
        assert torch.equal(value, second["again"][name])
        assert not torch.equal(value, first["once"][name])


class Uneven(nn.Module):
    """A pipeline's second stage has a layer that can be split, or one that cannot be as was said, or none."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8))
        self.last = nn.Linear(8, last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def staged() -> list[str]:
    torch.manual_seed(0)
    said = []
    for last, plan in ((5, {}), (5, {"last": "colwise"}), (1_001, {})):
        model = pf.configure(Uneven(last), loss="cross_entropy")
        options = {"tensor_parallel": {"plan": plan} if plan else {}, "pipeline": {"stages": ("last",)}}
        plan = pf.Plan(pp=2, tp=2, accumulate=2, options=options)
        runs = [pf.Trainer(max_steps=1, progress=False, plan=plan) for _ in range(2)]
        said += [refused(lambda m=model, r=r, n=last: r.fit(m, classes(n, 6), batch_size=4)) for r in runs]
    return said


def test_what_one_stage_refuses_all_ranks_refuse(ranks: Any) -> None:
    for said in ranks(4, staged):
        assert "nothing in Uneven is known to be splittable" in said[0]
        assert "last has 5 outputs, which tp=2 does not divide" in said[2]
        assert said[4:] == ["nothing", "nothing"]  # the second goes on with the stages and parts of the first


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"tp": 2, "compile": True}, "tensor-parallel-compile"),
        ({"tp": 2, "apply_groups": "backward"}, "tensor-parallel-backward-apply"),
        ({"tp": 2, "pp": 2, "options": {"tensor_parallel": SHARES}}, "sequence-parallel-pipeline"),
    ],
)
def test_the_table_refuses(fields: dict[str, Any], rule: str) -> None:
    assert rule in [broken.id for broken in judge(fields).broken]
    assert judge({"tp": 2, "dp": 2, "accumulate": 2, "precision": "bf16"}).legal


@pytest.mark.parametrize("arguments", [{"plan": "colwise"}, {"modules": "blocks"}, {"modules": [1]}])
def test_arguments_of_another_kind_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(pf.PlanError, match="of TensorParallel"):
        pf.plugins.TensorParallel(2, **arguments)


@pytest.mark.parametrize(("here", "warned"), [("2", False), ("4", False), ("3", True), ("1", True)])
def test_a_group_across_hosts_is_warned_about(monkeypatch: pytest.MonkeyPatch, here: str, warned: bool) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    assert bool(warning_across_hosts(2)) == warned
