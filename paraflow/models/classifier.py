"""A classifier to train as it is or to subclass."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paraflow.errors import ModelError
from paraflow.models.losses import cross_entropy
from paraflow.models.model import Model
from paraflow.models.recipe import recipe_of

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """The sizes of a multi-layer perceptron.

    Attributes:
        inputs: Features of a sample, after its dimensions are flattened into one.
        classes: Number of classes.
        hidden: Features of each hidden layer; empty for a linear classifier.
        dropout: Dropped after each hidden layer while training.
        activation: "relu", "gelu", "silu" or "tanh".

    Raises:
        ModelError: If a size cannot be.
    """

    inputs: int
    classes: int
    hidden: Sequence[int] = (128,)
    dropout: float = 0.0
    activation: Literal["relu", "gelu", "silu", "tanh"] = "relu"

    def __post_init__(self) -> None:
        if min(self.inputs, *self.hidden, 1) < 1:
            raise ModelError(
                f"ClassifierConfig(inputs={self.inputs}, hidden={self.hidden}) has an empty layer; give positive sizes."
            )
        if self.classes < 2:
            raise ModelError(
                f"ClassifierConfig(classes={self.classes}) has nothing to tell apart; give 2 classes or more."
            )
        if not 0 <= self.dropout < 1:
            raise ModelError(
                f"ClassifierConfig(dropout={self.dropout}) is a probability; give a number from 0 to below 1."
            )
        if self.activation not in ACTIVATIONS:
            raise ModelError(
                f'ClassifierConfig(activation="{self.activation}") is not known; write one of {", ".join(ACTIVATIONS)}.'
            )


class Classifier(Model):
    """Maps samples to class scores, and trains on cross-entropy with accuracy as its metric.

    Batches are pairs (inputs, classes): inputs float [batch, ...], classes int64 [batch]. It trains without a call of
    `configure`; a loss or metrics named there are used instead.

    Args:
        body: A `ClassifierConfig`, from which a multi-layer perceptron is made; or any module that maps inputs to
            scores [batch, classes], or to features [batch, features] if `features` is given.
        features: How many features `body` gives, for a linear layer to be put on top of it.
        classes: How many classes that layer tells apart.

    Raises:
        ModelError: If one of `features` and `classes` is given without the other, or beside a `ClassifierConfig`.

    Example:
        >>> model = Classifier(ClassifierConfig(inputs=64, classes=10))
        >>> model(torch.zeros(5, 8, 8)).shape
        torch.Size([5, 10])
        >>> Classifier(torch.nn.Linear(64, 32), features=32, classes=10)(torch.zeros(5, 64)).shape
        torch.Size([5, 10])
    """

    def __init__(
        self, body: ClassifierConfig | nn.Module, *, features: int | None = None, classes: int | None = None
    ) -> None:
        super().__init__()
        _check_head(body, features, classes)
        self.body = self.make_body(body) if isinstance(body, ClassifierConfig) else body
        self.head = self.make_head(features, classes) if features and classes else nn.Identity()

    def make_body(self, config: ClassifierConfig) -> nn.Module:
        """The multi-layer perceptron of `config`, which flattens its inputs."""
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in itertools.pairwise([config.inputs, *config.hidden]):
            layers += [nn.Linear(inputs, outputs), ACTIVATIONS[config.activation]()]
            layers += [nn.Dropout(config.dropout)] if config.dropout else []
        last = [config.inputs, *config.hidden][-1]
        return nn.Sequential(*layers, nn.Linear(last, config.classes))

    def make_head(self, features: int, classes: int) -> nn.Module:
        """The layer from features to class scores."""
        return nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Scores (logits) float [batch, classes] of inputs float [batch, ...]."""
        return self.head(self.body(x))  # type: ignore[no-any-return]

    def loss(self, output: Any, target: Any) -> Any:
        """The loss that `configure` named; if none, cross-entropy."""
        return cross_entropy(output, target) if recipe_of(self).loss is None else super().loss(output, target)

    def metrics(self) -> Sequence[Any] | Mapping[str, Any]:
        """The metrics that `configure` named; if none, accuracy."""
        return recipe_of(self).metrics or ["accuracy"]

    @torch.no_grad()
    def classify(self, x: Tensor) -> Tensor:
        """The most likely class of each input: int64 [batch]."""
        was_training = self.training
        self.eval()
        classes = self(x).argmax(dim=-1)
        self.train(was_training)
        return classes  # type: ignore[no-any-return]


def _check_head(body: ClassifierConfig | nn.Module, features: int | None, classes: int | None) -> None:
    if not isinstance(body, (ClassifierConfig, nn.Module)):
        raise ModelError(
            f"Classifier was given a {type(body).__name__}; give a ClassifierConfig(inputs=..., classes=...) or a "
            "module."
        )
    if isinstance(body, ClassifierConfig) and (features or classes):
        raise ModelError("ClassifierConfig names the classes already; leave features and classes out beside it.")
    if (features is None) != (classes is None):
        raise ModelError(
            f"Classifier was given features={features} and classes={classes}; give both to have a linear layer put on "
            "top of the body, or none if the body gives the scores itself."
        )
