"""Activation checkpointing under the Trainer: the same training as without it, under every plan."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import paraflow as pf
from paraflow.errors import PlanError
from paraflow.models.causal_lm import CausalLM, CausalLMConfig
from paraflow.plugins import ActivationCheckpointing
from tests.parity.runs import Recorder

KINDS: list[Any] = ["full", "selective", "offload", "auto", ["*attention", "blocks.1.feed_forward"]]
STEPS = 3


def language(dropout: float = 0.1, layers: int = 3) -> CausalLM:
    torch.manual_seed(1)
    model = CausalLM(CausalLMConfig(vocab_size=17, layers=layers, hidden=16, heads=2, context=8, dropout=dropout))
    model.configure(optimizer="adamw", lr=1e-2)
    return model


def tokens(count: int = 24) -> torch.Tensor:
    return torch.randint(0, 17, (count, 9), generator=torch.Generator().manual_seed(2))


def fit(model: nn.Module, **plan: Any) -> dict[str, Any]:
    """Trains a few steps: losses, norms, and the parameters as one device holds them."""
    recorder = Recorder()
    trainer = pf.Trainer(
        max_steps=STEPS, seed=5, progress=False, clip_norm=float("inf"), callbacks=[recorder], device="cpu", **plan
    )
    trainer.fit(model, tokens(), batch_size=8)
    state = {name: whole(value).clone() for name, value in trainer.engine.model_state().items()}
    return {"losses": recorder.losses, "norms": recorder.norms, "parameters": state}


def whole(value: Any) -> torch.Tensor:
    return value.detach().full_tensor() if hasattr(value, "full_tensor") else value.detach()


def option(kind: Any) -> dict[str, Any]:
    chosen = {"activation_checkpointing": kind}
    if kind == "offload":
        return {"plugins": [ActivationCheckpointing("offload", offload_min_bytes=0)]}
    return {**chosen, "memory_budget": "1GiB"} if kind == "auto" else chosen


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("plan", [{}, {"accumulate": 2, "precision": "bf16"}], ids=["plain", "bf16"])
def test_training_is_the_same_bit_by_bit(kind: Any, plan: dict[str, Any]) -> None:
    assert_equal(fit(language(), **plan), fit(language(), **plan, **option(kind)))


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["losses"] == other["losses"]
    assert one["norms"] == other["norms"]
    assert list(one["parameters"]) == list(other["parameters"])
    assert all(torch.equal(one["parameters"][name], other["parameters"][name]) for name in one["parameters"])


def fit_all(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [fit(language(), **plan)] + [fit(language(), **plan, **option(kind)) for kind in KINDS]


@pytest.mark.parametrize("plan", [{"dp": 2, "accumulate": 2}, {"fsdp": 2}, {"fsdp": 2, "zero": 2}], ids=str)
def test_training_on_two_ranks_is_the_same_bit_by_bit(ranks: Any, plan: dict[str, Any]) -> None:
    for plain, *treated in ranks(2, fit_all, plan):
        for one in treated:
            assert_equal(plain, one)


def test_a_later_trainer_finds_the_module_as_the_user_made_it() -> None:
    model, reference = language(), language()
    trainer = pf.Trainer(max_steps=1, seed=5, progress=False, device="cpu", activation_checkpointing="full")
    trainer.fit(model, tokens(), batch_size=8)
    pf.Trainer(max_steps=1, seed=5, progress=False, device="cpu").fit(reference, tokens(), batch_size=8)
    assert not any("forward" in vars(part) for part in model.modules())
    other = copy.deepcopy(model)
    assert_equal(fit(other), fit(model, activation_checkpointing="selective"))
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in reference.named_parameters()]


def test_auto_keeps_to_the_budget_and_says_what_it_chose(capsys: Any) -> None:
    model = language(0.0, layers=6)
    trainer = pf.Trainer(
        max_steps=1, seed=5, device="cpu", activation_checkpointing="auto", memory_budget=budget_of(model)
    )
    trainer.fit(model, tokens(), batch_size=8)
    plugin = next(plugin for plugin in trainer.engine.plugins if isinstance(plugin, ActivationCheckpointing))
    assert plugin.treated.forwards
    said = capsys.readouterr().out
    assert all(word in said for word in ("treatment", "bytes saved", "time added", "predicted peak"))


def budget_of(model: nn.Module) -> int:
    """Between what is needed at least and what keeping everything takes."""
    with pytest.raises(PlanError, match=r"budget of 1\.0 KiB cannot be met.*memory_budget=") as refused:
        fit(copy.deepcopy(model), activation_checkpointing="auto", memory_budget="1KiB")
    return int(str(refused.value).split("memory_budget=")[1].split(" ")[0]) + 1000


def refuse(ranks_plan: dict[str, Any]) -> str:
    with pytest.raises(PlanError) as refused:
        fit(language(), **ranks_plan)
    return str(refused.value)


def test_a_budget_that_cannot_be_met_is_refused_on_every_rank_alike(ranks: Any) -> None:
    first, second = ranks(2, refuse, {"dp": 2, "activation_checkpointing": "auto", "memory_budget": "1KiB"})
    assert first == second
    assert "cannot be met" in first


@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        ({"compile": True, "activation_checkpointing": "offload"}, "recompute-compile"),
        ({"compile": True, "activation_checkpointing": "auto"}, "recompute-compile"),
        ({"memory_budget": "1GiB", "activation_checkpointing": "full"}, "budget-needs-auto"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused_by_its_rule(plan: dict[str, Any], rule: str) -> None:
    with pytest.raises(PlanError) as refused:
        fit(language(), **plan)
    assert refused.value.rule == rule


def test_a_pattern_that_matches_nothing_says_what_there_is() -> None:
    with pytest.raises(PlanError, match=r"no module that matches \['layers\.\*'\]. Its modules are blocks, blocks\.0"):
        fit(language(), activation_checkpointing=["layers.*"])
    with pytest.raises(PlanError, match="patterns twice"):
        ActivationCheckpointing(["a"], blocks=["b"])
    with pytest.raises(PlanError, match="takes one of"):
        ActivationCheckpointing("some")


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3))

    def forward(self, x: Any) -> Any:
        return (x @ self.weight).square().mean()


def test_a_model_that_cannot_be_divided_is_told_so(capsys: Any) -> None:
    def run(model: nn.Module) -> None:
        pf.configure(model, optimizer="sgd", lr=0.1, loss=lambda out, _: out.mean())
        pf.Trainer(max_steps=1, device="cpu", activation_checkpointing="full").fit(
            model, (torch.randn(4, 4), torch.randn(4)), batch_size=2
        )

    with pytest.raises(
        PlanError, match=r"Bare has no blocks\. It has no modules.*or leave activation_checkpointing out"
    ):
        run(Bare())
    run(nn.ModuleDict({"body": nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 3))}).body)
    assert "the block '" not in capsys.readouterr().out
    run(nn.Sequential(nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4)), nn.Linear(4, 3)))
    assert "the block '0' holds 97% of the model." in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_compiled_blocks_are_recomputed_too(kind: str) -> None:
    plan = {"compile": True, "options": {"compile": {"backend": "aot_eager"}}}
    plain = fit(language(), plan=pf.Plan(**plan))
    treated = fit(language(), plan=pf.Plan(**plan, activation_checkpointing=kind))
    torch.testing.assert_close(plain, treated)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "recomputed"), [(None, False), ("full", True), ("selective", False)])
def test_the_compiler_is_told_what_to_keep(kind: str | None, recomputed: bool) -> None:
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    in_backward: list[str] = []

    def backward(graph: Any, example: Any) -> Any:
        in_backward.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=lambda graph, example: make_boxed_func(graph.forward),
        bw_compiler=backward,
        partition_fn=min_cut_rematerialization_partition,
    )
    options = {"compile": {"backend": backend, "fullgraph": True}}
    fit(language(0.0), plan=pf.Plan(compile=True, activation_checkpointing=kind, options=options))
    assert ("aten.addmm.default" in in_backward) is recomputed
    assert ("aten.gelu.default" in in_backward) is (kind is not None)
