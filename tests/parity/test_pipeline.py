"""The same training when the model's layers lie on several ranks, under every schedule."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import paraflow as pf
from paraflow.models import CausalLM, CausalLMConfig, MaskedLM, MaskedLMConfig
from tests.models.test_transformers import build, rows
from tests.parity.runs import Measured, assert_same, by_hand, by_trainer
from tests.parity.tasks import FURTHER, Case, Classification, samples

BATCH = 12
COUNT = 23  # and a last batch of 11


class Deep(Classification):
    """Eight layers to cut between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        layers = [nn.Linear(6, 16), *(nn.Linear(16, 16) for _ in range(6)), nn.Linear(16, 4)]
        self.body = nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def causal(dropout: float = 0.0) -> CausalLM:
    torch.manual_seed(1)
    config = CausalLMConfig(
        vocab_size=20, layers=3, hidden=16, heads=2, context=8, positions="learned", dropout=dropout
    )
    return CausalLM(config).configure(optimizer="sgd", lr=0.3, momentum=0.9, metrics=["accuracy"])


def masked() -> MaskedLM:
    torch.manual_seed(1)
    config = MaskedLMConfig(vocab_size=20, layers=3, hidden=16, heads=2, context=8)
    return MaskedLM(config).configure(optimizer="sgd", lr=0.3, weight_decay=0.01)


def transformers_model(name: str) -> Any:
    return pf.configure(build(name), optimizer="sgd", lr=0.3)  # Adam would make much of the last bits


def tokens(count: int) -> torch.Tensor:
    return torch.randint(0, 20, (count, 9), generator=torch.Generator().manual_seed(2))


def padded(count: int) -> dict[str, torch.Tensor]:
    data = tokens(count)[:, :8]
    lengths = torch.arange(count) % 6 + 2
    there = torch.arange(8)[None] < lengths[:, None]
    return {"input_ids": data, "labels": torch.where(there, data, -100), "attention_mask": there}


def by_one_process(*_: Any) -> Any:
    raise NotImplementedError


FURTHER.update(
    {
        "deep": Case(Deep, samples, by_one_process),
        "causal": Case(causal, tokens, by_one_process),
        "masked": Case(masked, padded, by_one_process),
        **{
            n: Case(lambda n=n: transformers_model(n), lambda _: rows(), by_one_process)
            for n in ("bert", "gpt2", "llama")
        },
    }
)

Asked = tuple[str, dict[str, Any], dict[str, Any]]  # a case, the pipeline's arguments, the plan's fields


def piped(degree: int, asked: list[Asked], count: int = COUNT, **plan: Any) -> list[Measured]:
    """Trains several cases under pipelines, one after another on the same ranks."""
    return [
        by_trainer(name, count, BATCH, plugins=[pf.plugins.Pipeline(degree, **arguments)], **{**plan, **own})
        for name, arguments, own in asked
    ]


def test_every_loss_and_number_of_micro_batches_trains_alike(ranks: Any) -> None:
    asked: list[Asked] = [
        ("classification", {}, {"accumulate": 1}),
        ("token sums", {}, {"accumulate": 1}),
        ("token sums", {"schedule": "gpipe"}, {"accumulate": 3}),
        ("token means", {"schedule": "interleaved_zero_bubble"}, {"accumulate": 4}),
        ("own loss", {}, {"accumulate": 5}),
    ]
    references = {name: by_hand(name, COUNT, BATCH, clip_norm=0.2) for name, *_ in asked}
    for measured in ranks(2, piped, 2, asked, clip_norm=0.2):
        compare(measured, references, asked)


def test_every_schedule_trains_alike(ranks: Any) -> None:
    asked: list[Asked] = [
        ("deep", {"schedule": "1f1b"}, {"accumulate": 6}),
        ("deep", {"schedule": "1f1b"}, {"accumulate": 2}),
        ("deep", {"schedule": "gpipe"}, {"accumulate": 3}),
        ("deep", {"schedule": "interleaved", "chunks": 2}, {"accumulate": 4}),
        ("deep", {"schedule": "interleaved_zero_bubble", "chunks": 2}, {"accumulate": 5}),
        ("deep", {"schedule": "zbv", "chunks": 2}, {"accumulate": 4}),
    ]
    reference = by_trainer("deep", COUNT, BATCH, clip_norm=0.2)
    for measured in ranks(4, piped, 4, asked, clip_norm=0.2):
        compare(measured, {"deep": reference}, asked)


def compare(measured: list[Measured], references: dict[str, Measured], asked: list[Asked]) -> None:
    for (name, arguments, plan), one in zip(asked, measured, strict=True):
        try:
            assert_same(one, references[name])
        except AssertionError as error:
            raise AssertionError(f"{name} {arguments} {plan}: {error}") from error


def test_replicas_of_a_pipeline_train_alike(ranks: Any) -> None:
    asked: list[Asked] = [
        ("causal", {}, {"accumulate": 2}),
        ("masked", {}, {"accumulate": 1}),
        ("masked", {"schedule": "zbv", "chunks": 2}, {"accumulate": 3}),
    ]
    references = {name: by_trainer(name, COUNT, BATCH, clip_norm=0.2) for name, *_ in asked}
    for measured in ranks(4, piped, 2, asked, dp=2, clip_norm=0.2):
        compare(measured, references, asked)


def test_micro_batches_without_samples_train_alike(ranks: Any) -> None:
    asked: list[Asked] = [("token sums", {}, {"accumulate": 3}), ("own loss", {"schedule": "gpipe"}, {"accumulate": 2})]
    references = {name: by_hand(name, 14, BATCH, clip_norm=0.2) for name, *_ in asked}  # a last batch of 2
    for measured in ranks(4, piped, 2, asked, dp=2, clip_norm=0.2, count=14):
        compare(measured, references, asked)


def test_models_of_transformers_train_alike(ranks: Any) -> None:
    asked: list[Asked] = [("bert", {}, {"accumulate": 2}), ("gpt2", {}, {"accumulate": 3}), ("llama", {}, {})]
    references = {name: by_trainer(name, COUNT, BATCH, clip_norm=0.2) for name, *_ in asked}
    for measured in ranks(2, piped, 2, asked, clip_norm=0.2):
        compare(measured, references, asked)
