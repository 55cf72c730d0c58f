"""A tied head whose classes are split over ranks, used by code between the units of a pipeline."""

from __future__ import annotations

from typing import Any

import torch

import paraflow as pf
from paraflow.models import CausalLM, CausalLMConfig, MaskedLM, MaskedLMConfig
from paraflow.task_graph import task_graph

SIZES: dict[str, Any] = {"vocab_size": 1002, "layers": 2, "hidden": 16, "heads": 2, "context": 8}


def verified(kind: str) -> tuple[float, float, float]:
    """How far losses, norms and parameters are from one process, under tp=2 and pp=2."""
    torch.manual_seed(0)
    model = CausalLM(CausalLMConfig(**SIZES)) if kind == "causal" else MaskedLM(MaskedLMConfig(**SIZES))
    model.configure(optimizer="sgd", lr=0.1)
    tokens = torch.randint(1000, (8, 8))
    labels = torch.where(torch.rand(8, 8) < 0.5, tokens, -100)
    data: Any = tokens if kind == "causal" else {"input_ids": tokens, "labels": labels}
    found = pf.Trainer(tp=2, pp=2, accumulate=2, progress=False).verify(model, data, steps=2, batch_size=4)
    return found.loss, found.norm, max(found.compared.values())


def verified_kinds() -> list[tuple[float, float, float]]:
    return [verified("causal"), verified("masked")]


def first_stage() -> list[str]:
    """The names of the units that a run puts in the first stage."""
    model = CausalLM(CausalLMConfig(**{**SIZES, "layers": 4})).configure(lr=0.1)
    trainer = pf.Trainer(pp=2, accumulate=2, max_steps=1, progress=False)
    trainer.fit(model, torch.randint(1000, (4, 9)), batch_size=4)
    return list(vars(model)["_paraflow_layout"].cut.names[0])


def test_it_trains_as_on_one_process(ranks: Any) -> None:
    for differences in ranks(4, verified_kinds):
        assert max(map(max, differences)) < 1e-4, differences


def test_the_task_graph_has_the_stages_of_the_run(ranks: Any) -> None:
    graph = task_graph(CausalLM(CausalLMConfig(**{**SIZES, "layers": 4})), pf.Plan(pp=2), {})
    modules = graph.nodes[0].modules
    units = ranks(2, first_stage)[0]
    assert units == ["embedding", *(f"blocks.{index}" for index in range(4))]
    assert modules == ("embedding", "blocks")
