"""Models of transformers, as they come, train in split layers, stages and both to what plain torch gives by itself."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import paraflow as pf
from paraflow.data.order import shuffled
from tests.parity.runs import Measured, Recorder, assert_same, whole_parameters
from tests.tensor_parallel.models import VOCABULARY, bert, gpt2, llama

COUNT, BATCH, TOKENS, EPOCHS, CLIP = 10, 4, 12, 2, 0.5  # a last batch of two
RECIPES: dict[str, dict[str, Any]] = {
    "bert": {"optimizer": "sgd", "lr": 0.3, "momentum": 0.9},
    "gpt2": {"optimizer": "sgd", "lr": 0.3},
    "llama": {"optimizer": "adamw", "lr": 1e-2, "eps": 1e-2, "weight_decay": 0.0},
    "tied llama": {"optimizer": "sgd", "lr": 0.3},
}
MODELS = tuple(RECIPES)

Asked = tuple[str, dict[str, Any]]  # a model and the plan's fields


def model_of(name: str) -> nn.Module:
    layers = 4
    if name == "bert":
        return bert(num_hidden_layers=layers)
    if name == "gpt2":
        return gpt2(n_layer=layers)
    return llama(num_hidden_layers=layers, tie_word_embeddings=name == "tied llama")


def padded(name: str) -> dict[str, torch.Tensor]:
    """Rows of 12, 11, ... tokens, padded on the right; BERT predicts some of them, the others all."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, VOCABULARY, (COUNT, TOKENS), generator=generator)
    there = torch.arange(TOKENS)[None] < TOKENS - torch.arange(COUNT)[:, None]
    predicted = there & (torch.rand(tokens.shape, generator=generator) < 0.5) if name == "bert" else there
    return {
        "input_ids": tokens.where(there, torch.tensor(0)),
        "attention_mask": there.long(),
        "labels": tokens.where(predicted, torch.tensor(-100)),
    }


@cache
def by_hand(name: str) -> Measured:
    """Trains as one would without us: the model's own loss of each whole batch."""
    model, data, result = model_of(name), padded(name), Measured()
    recipe = dict(RECIPES[name])
    make = torch.optim.AdamW if recipe.pop("optimizer") == "adamw" else torch.optim.SGD
    optimizer = make(model.parameters(), **recipe)
    for epoch in range(EPOCHS):
        order = shuffled(COUNT, 5, epoch)
        for start in range(0, COUNT, BATCH):
            index = order[start : start + BATCH]
            optimizer.zero_grad()
            loss = model(**{key: value[index] for key, value in data.items()}).loss
            loss.backward()
            result.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            result.losses.append(loss.item())
    result.parameters = {key: value.detach() for key, value in model.state_dict().items()}
    return result


def trained(name: str, plan: dict[str, Any]) -> Measured:
    fields = dict(plan)
    options = fields.pop("options", {})
    recorder, model = Recorder(), pf.configure(model_of(name), **RECIPES[name])
    trainer = pf.Trainer(
        max_epochs=EPOCHS,
        seed=5,
        progress=False,
        clip_norm=CLIP,
        callbacks=[recorder],
        plan=pf.Plan(**fields, options=options),
    )
    trainer.fit(model, padded(name), batch_size=BATCH)
    return Measured(recorder.losses, recorder.norms, whole_parameters(trainer))


def train_all(asked: list[Asked]) -> list[Measured]:
    return [trained(name, plan) for name, plan in asked]


def compare(everywhere: list[list[Measured]], asked: list[Asked]) -> None:
    for results in everywhere:
        for (name, plan), measured in zip(asked, results, strict=True):
            try:
                assert_same_training(measured, by_hand(name))
            except AssertionError as error:
                raise AssertionError(f"{name} {plan}: {error}") from error


def assert_same_training(mine: Measured, theirs: Measured) -> None:
    mine.metrics = theirs.metrics = {"loss": [], "val_loss": []}  # nothing was evaluated
    assert_same(mine, theirs)


def test_split_layers(ranks: Any) -> None:
    asked: list[Asked] = [(name, {"tp": 2}) for name in MODELS]
    compare(ranks(2, train_all, asked, timeout=120), asked)


def test_stages(ranks: Any) -> None:
    asked: list[Asked] = [(name, {"pp": 2, "accumulate": 2}) for name in MODELS]
    compare(ranks(2, train_all, asked, timeout=120), asked)


def test_split_layers_in_stages(ranks: Any) -> None:
    asked: list[Asked] = [(name, {"tp": 2, "pp": 2, "accumulate": 2}) for name in MODELS]
    compare(ranks(4, train_all, asked, timeout=120), asked)


SCHEDULES: list[Asked] = [
    (name, {"tp": 2, "pp": 2, "accumulate": 4, "options": {"pipeline": {"schedule": schedule, "chunks": chunks}}})
    for name, schedule, chunks in [
        ("bert", "gpipe", 1),
        ("gpt2", "interleaved", 2),
        ("llama", "zbv", 2),
        ("tied llama", "interleaved_zero_bubble", 2),
    ]
]
FOURS: list[Asked] = [
    ("bert", {"tp": 2, "fsdp": 2, "zero": 3}),
    ("gpt2", {"pp": 2, "fsdp": 2, "zero": 3, "accumulate": 2}),
    ("llama", {"pp": 4, "accumulate": 4}),
    ("tied llama", {"tp": 2, "dp": 2, "accumulate": 2}),
    ("bert", {"pp": 2, "dp": 2, "accumulate": 2, "activation_checkpointing": "full"}),
    ("gpt2", {"tp": 2, "pp": 2, "accumulate": 2, "activation_checkpointing": "selective", "apply_groups": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize("asked", [SCHEDULES, FOURS], ids=["schedules", "other plans"])
def test_other_schedules_and_plans(ranks: Any, asked: list[Asked]) -> None:
    compare(ranks(4, train_all, asked, timeout=240), asked)


EIGHTS: list[Asked] = [
    (name, {**degrees, "tp": 2, "pp": 2, "accumulate": 2})
    for degrees in ({"fsdp": 2, "zero": 3}, {"dp": 2})
    for name in ("bert", "gpt2", "llama")
]


@pytest.mark.slow
def test_eight_ranks() -> None:
    compare(pf.spawn(train_all, 8, (EIGHTS,), timeout=300), EIGHTS)


def verified(plans: list[dict[str, Any]]) -> list[tuple[bool, str]]:
    found = []
    for plan in plans:
        for name in MODELS:
            model = pf.configure(model_of(name), **RECIPES[name])
            result = pf.Trainer(progress=False, seed=5, **plan).verify(model, padded(name), steps=3, batch_size=BATCH)
            found.append((result.agrees and max(result.loss, result.norm) < 1e-5, str(result)))
    return found


@pytest.mark.parametrize("plans", [[{"tp": 2}, {"pp": 2, "accumulate": 2}], [{"tp": 2, "pp": 2, "accumulate": 2}]])
def test_verify_says_that_they_agree(ranks: Any, plans: list[dict[str, Any]]) -> None:
    for results in ranks(4 if "tp" in plans[-1] else 2, verified, plans, timeout=180):
        for agrees, said in results:
            assert agrees, said
