from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from paraflow.errors import ModelError
from paraflow.optim import build_optimizer, optimizer_names


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))


def build(choice: Any, model: nn.Module, **arguments: Any) -> torch.optim.Optimizer:
    return build_optimizer(choice, model.named_parameters(), **{"lr": 0.1, **arguments})


@pytest.mark.parametrize("name", sorted(set(optimizer_names()) - {"muon", "sparseadam"}))
def test_every_name_trains(name: str) -> None:
    model = network()
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = build(name.upper(), model)
    assert type(optimizer).__name__.lower() == name
    assert optimizer.param_groups[0]["lr"] == 0.1
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_without_weight_decay_it_is_torchs_own_optimizer() -> None:
    ours, theirs = network(), network()
    optimizers = build("adamw", ours), torch.optim.AdamW(theirs.parameters(), lr=0.1)
    assert optimizers[0].defaults == optimizers[1].defaults
    x = torch.randn(5, 4)
    for _ in range(3):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_weight_decay_spares_biases_and_norms() -> None:
    model = network()
    decayed, others = build("adamw", model, weight_decay=0.2, betas=(0.8, 0.9)).param_groups
    assert [id(parameter) for parameter in decayed["params"]] == [id(model[0].weight), id(model[2].weight)]
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.2, 0.0)
    assert len(others["params"]) == 4
    assert others["betas"] == (0.8, 0.9)
    (alone,) = build("adamw", model, weight_decay=0.0).param_groups
    assert (len(alone["params"]), alone["weight_decay"]) == (6, 0.0)


def test_frozen_and_tied_parameters() -> None:
    model = network()
    model[0].requires_grad_(False)
    model.tied = nn.Linear(8, 3)
    model.tied.weight = model[2].weight
    named = [*model.named_parameters(remove_duplicate=False)]
    assert len(named) == 8
    held = build_optimizer("sgd", named, lr=0.1).param_groups[0]["params"]
    assert len(held) == len({id(parameter) for parameter in held}) == 5
    assert held[0] is model[1].weight
    model.requires_grad_(False)
    with pytest.raises(ModelError, match="all are frozen"):
        build("adamw", model)
    with pytest.raises(ModelError, match="none at all"):
        build("adamw", nn.ReLU())


def test_classes_functions_and_partials() -> None:
    model = network()
    by_class = build(torch.optim.SGD, model, weight_decay=0.5, momentum=0.9)
    assert [group["weight_decay"] for group in by_class.param_groups] == [0.5, 0.0]
    assert (by_class.param_groups[0]["lr"], by_class.param_groups[0]["momentum"]) == (0.1, 0.9)
    by_function = build(lambda parameters: torch.optim.SGD(parameters, lr=0.7), model)
    assert by_function.param_groups[0]["lr"] == 0.7
    given_lr = build(lambda parameters, lr: torch.optim.SGD(parameters, lr=lr / 2), model)
    assert given_lr.param_groups[0]["lr"] == 0.05
    fixed = build(functools.partial(torch.optim.SGD, lr=0.3), model)
    assert fixed.param_groups[0]["lr"] == 0.3
    with pytest.raises(ModelError, match="returned a list"):
        build(lambda parameters: [1], model)


def test_ready_made_optimizer() -> None:
    model = network()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.3)
    assert build(optimizer, model) is optimizer
    with pytest.raises(ModelError, match="none is one of this model's"):
        build(optimizer, network())


@pytest.mark.parametrize(
    ("choice", "arguments", "message"),
    [
        ("adanw", {}, 'No optimizer is called "adanw". Did you mean "adamw"'),
        ("lbfgs", {}, "closure"),
        ("adam", {"momentum": 0.9}, "Adam has no option called momentum; its options are .*betas"),
        ("rprop", {"weight_decay": 0.1}, "Rprop has no weight decay"),
        ("muon", {}, r"Muon updates matrices only, and 4 .*0.bias, 1.weight, 1.bias, \.\.\."),
    ],
)
def test_what_cannot_be_built_gets_a_sentence(choice: str, arguments: dict[str, Any], message: str) -> None:
    if choice == "muon" and "muon" not in optimizer_names():
        pytest.skip("this torch has no Muon")
    with pytest.raises(ModelError, match=message):
        build(choice, network(), **arguments)


@pytest.mark.skipif("muon" not in optimizer_names(), reason="this torch has no Muon")
def test_muon_trains_matrices() -> None:
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 3, bias=False))
    before = model[0].weight.clone()
    optimizer = build("muon", model, lr=0.01, weight_decay=0.1)
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
    assert not torch.equal(before, model[0].weight)
