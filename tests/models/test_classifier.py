from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paraflow.errors import ModelError
from paraflow.models.classifier import Classifier, ClassifierConfig


def test_perceptron_equals_its_formula() -> None:
    classifier = Classifier(ClassifierConfig(inputs=12, classes=3, hidden=(8, 5), activation="tanh"))
    x = torch.randn(4, 3, 2, 2)
    hidden = x.flatten(1)
    linears = [layer for layer in classifier.modules() if isinstance(layer, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in linears] == [(12, 8), (8, 5), (5, 3)]
    for layer in linears[:-1]:
        hidden = layer(hidden).tanh()
    torch.testing.assert_close(classifier(x), linears[-1](hidden))


def test_no_hidden_layer_is_a_linear_classifier() -> None:
    classifier = Classifier(ClassifierConfig(inputs=12, classes=3, hidden=()))
    assert sum(parameter.numel() for parameter in classifier.parameters()) == 12 * 3 + 3


def test_dropout_only_while_training() -> None:
    classifier = Classifier(ClassifierConfig(inputs=12, classes=3, dropout=0.5))
    x = torch.randn(4, 12)
    assert not torch.equal(classifier(x), classifier(x))
    classifier.eval()
    assert torch.equal(classifier(x), classifier(x))


def test_own_body_alone_and_under_a_head() -> None:
    body = nn.Sequential(nn.Flatten(), nn.Linear(12, 6))
    x = torch.randn(4, 3, 4)
    assert torch.equal(Classifier(body)(x), body(x))
    classifier = Classifier(body, features=6, classes=3)
    torch.testing.assert_close(classifier(x), F.linear(body(x), classifier.head.weight, classifier.head.bias))


def test_it_trains_without_configuration_and_obeys_one() -> None:
    classifier = Classifier(ClassifierConfig(inputs=12, classes=3))
    batch = torch.randn(5, 12), torch.tensor([0, 1, 2, 1, 0])
    torch.testing.assert_close(classifier.training_step(batch)["loss"], F.cross_entropy(classifier(batch[0]), batch[1]))
    assert list(classifier.metrics()) == ["accuracy"]
    classifier.configure(lr=0.5)
    assert list(classifier.metrics()) == ["accuracy"]
    classifier.configure(loss=lambda output, target: output.sum() * 0 + 2.0, metrics=["f1"])
    assert classifier.training_step(batch)["loss"].item() == 2.0
    assert list(classifier.metrics()) == ["f1"]


def test_it_learns_and_classifies() -> None:
    torch.manual_seed(0)
    classifier = Classifier(ClassifierConfig(inputs=2, classes=2, hidden=(16,)))
    x = torch.randn(256, 2)
    classes = (x[:, 0] * x[:, 1] > 0).long()
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=0.03)
    for _ in range(150):
        optimizer.zero_grad()
        classifier.training_step((x, classes))["loss"].backward()
        optimizer.step()
    assert (classifier.classify(x) == classes).float().mean() > 0.95
    assert classifier.training


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": 0}, "empty layer"),
        ({"hidden": (8, 0)}, "empty layer"),
        ({"classes": 1}, "2 classes or more"),
        ({"dropout": -0.1}, "probability"),
        ({"activation": "sigmoid"}, "relu, gelu, silu, tanh"),
    ],
)
def test_sizes_that_cannot_be_get_a_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ClassifierConfig(**{"inputs": 4, "classes": 3, **changes})


def test_bad_bodies_get_a_sentence() -> None:
    with pytest.raises(ModelError, match="give both"):
        Classifier(nn.Linear(4, 3), classes=3)
    with pytest.raises(ModelError, match="names the classes already"):
        Classifier(ClassifierConfig(inputs=4, classes=3), features=2, classes=3)
    with pytest.raises(ModelError, match="was given a int"):
        Classifier(4)
