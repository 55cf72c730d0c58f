"""The same training when ranks compute single layers together."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.parity.runs import Measured, assert_same
from tests.tensor_parallel.models import Job, train, train_all

SHARES = {"sequence_parallel": True}

PAIRS: list[Job] = [
    ("causal", {}, {}, {"tp": 2, "clip_norm": 0.2}),
    ("causal", {"tied": False, "norm": "rms", "kv_heads": 1, "activation": "swiglu"}, SHARES, {"tp": 2}),
    ("masked", {}, SHARES, {"tp": 2, "activation_checkpointing": "full", "accumulate": 2}),
    ("ten classes", {}, {}, {"tp": 2}),
]
FOURS: list[Job] = [
    ("causal", {"hidden": 36, "heads": 6, "kv_heads": 3, "mlp_ratio": 1.5}, {}, {"tp": 4}),
    ("causal", {}, {}, {"tp": 2, "dp": 2, "accumulate": 2}),
    ("many classes", {}, {}, {"tp": 2, "dp": 2}),
]
TRANSFORMERS: list[Job] = [
    ("bert", {}, {}, {"tp": 2, "dp": 2}),
    ("gpt2", {}, SHARES, {"tp": 4}),
    ("llama", {}, {}, {"tp": 4}),
]
MORE: list[Job] = [
    ("causal", {"positions": "learned", "heads": 1}, {"plan": {"blocks.*.attention.*": "replicate"}}, {"tp": 4}),
    ("causal", {"kv_heads": 2}, SHARES, {"tp": 4}),
    ("masked", {}, {}, {"tp": 2, "dp": 2, "activation_checkpointing": "full"}),
    ("masked", {}, SHARES, {"tp": 2, "dp": 2}),
    ("many classes", {}, {}, {"tp": 4, "apply_groups": 2}),
    ("encoder", {}, {}, {"tp": 4}),
    ("bert", {"hidden_size": 40, "num_attention_heads": 5}, {}, {"tp": 4}),
    ("bert", {}, SHARES, {"tp": 4, "activation_checkpointing": "full"}),
    ("gpt2", {"n_embd": 36, "n_head": 6, "n_inner": 50}, {}, {"tp": 4}),
    ("gpt2", {}, {}, {"tp": 2, "dp": 2, "activation_checkpointing": "selective"}),
    ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}, SHARES, {"tp": 4}),
    ("llama", {"tie_word_embeddings": True}, SHARES, {"tp": 2, "dp": 2, "accumulate": 2}),
]


@cache
def reference(name: str, sizes: str, clip_norm: float) -> Measured:
    return train(name, eval(sizes), clip_norm=clip_norm)  # from a repr: dicts are no keys


def compare(ranks: Any, world_size: int, jobs: list[Job], timeout: float = 60.0) -> None:
    everywhere = ranks(world_size, train_all, jobs, timeout=timeout)
    for at, (name, sizes, _, plan) in enumerate(jobs):
        first = everywhere[0][at]
        assert_same(first, reference(name, repr(sizes), plan.get("clip_norm", float("inf"))))
        for other in everywhere[1:]:  # what is whole on every rank has not drifted by a bit
            assert other[at].losses == first.losses
            assert all(torch.equal(other[at].parameters[key], value) for key, value in first.parameters.items())


def test_two_ranks_train_alike(ranks: Any) -> None:
    compare(ranks, 2, PAIRS)


def test_four_ranks_train_alike(ranks: Any) -> None:
    compare(ranks, 4, FOURS)


def test_transformers_models_train_unmodified(ranks: Any) -> None:
    compare(ranks, 4, TRANSFORMERS, timeout=120)


@pytest.mark.slow
def test_other_sizes_and_plans_train_alike(ranks: Any) -> None:
    compare(ranks, 4, MORE, timeout=300)


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 3e-2), ("fp16", 5e-3)])
def test_half_precision_stays_within_its_bound(ranks: Any, precision: str, bound: float) -> None:
    jobs: list[Job] = [
        ("causal", {}, {}, {"tp": 2, "precision": precision}),
        ("masked", {}, SHARES, {"tp": 2, "precision": precision, "accumulate": 2}),
    ]
    for at, results in enumerate(zip(*ranks(2, train_all, jobs), strict=True)):
        expected = reference(jobs[at][0], "{}", float("inf"))
        for measured in results:
            torch.testing.assert_close(measured.losses, expected.losses, rtol=bound, atol=bound)
            torch.testing.assert_close(measured.norms, expected.norms, rtol=bound * 5, atol=bound)
        assert results[0].losses != expected.losses
        assert results[0].losses == results[1].losses
