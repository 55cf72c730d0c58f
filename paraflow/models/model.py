"""`Model`, the template that every other one extends: a module that knows how to be trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from paraflow.errors import ModelError
from paraflow.models import recipe
from paraflow.models.losses import loss_function
from paraflow.models.recipe import recipe_of
from paraflow.models.step import call_with_inputs, supervised_step


class Model(nn.Module):
    """An ``nn.Module`` that knows how to be trained. Define ``forward``; override what else should differ.

    Example:
        >>> import torch, paraflow as pf
        >>> class Net(pf.Model):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.body = torch.nn.Linear(4, 3)
        ...     def forward(self, x):
        ...         return self.body(x)
        >>> model = Net().configure(optimizer="adamw", lr=1e-3, loss="cross_entropy", metrics=["accuracy"])
        >>> history = pf.Trainer(max_epochs=1, progress=False).fit(model, (torch.zeros(8, 4), torch.zeros(8).long()))
        >>> sorted(history.history)
        ['accuracy', 'loss', 'lr']
    """

    configure = recipe.configure

    def training_step(self, batch: Any) -> Any:
        """Returns the loss of a micro-batch.

        Returns:
            A mean over the micro-batch's samples; or ``(sum, count)``; or a dict with ``loss``, the mean, and
            ``weight``, what it is over, and if wanted ``output`` and ``target`` for the metrics and other scalars to
            log.
        """
        return supervised_step(self, self.loss if self._has_loss() else None, batch)

    def _has_loss(self) -> bool:
        """Whether there is a loss other than the output's own."""
        return recipe_of(self).loss is not None or "loss" in self._modules or type(self).loss is not Model.loss

    def validation_step(self, batch: Any) -> Any:
        """Returns the loss of a micro-batch in evaluation: by default what `training_step` returns."""
        return self.training_step(batch)

    def predict_step(self, batch: Any) -> Any:
        """Returns the output of a micro-batch: tensors whose first dimension is the sample."""
        return call_with_inputs(self, batch)

    def loss(self, output: Any, target: Any) -> Any:
        """Returns the loss of an output: by default the one that `configure` named."""
        function = recipe_of(self).loss_function
        own = self._modules.get("loss")  # a module that was set as self.loss
        if function is None and own is not None:
            function = loss_function(own)
        if function is None:
            raise ModelError(f"{type(self).__name__} has no loss; write configure(loss=...) or override `loss`.")
        return function(output, target)

    def metrics(self) -> Sequence[Any] | Mapping[str, Any]:
        """Returns the metrics: names, torchmetrics objects or functions; by default those that `configure` named."""
        return recipe_of(self).metrics

    def configure_optimizers(self) -> Any:
        """Returns an optimizer, or ``(optimizer, schedule)`` with a scheduler, its name, or a function that makes it.

        It is called once the parameters are where the plan puts them, so build it from `named_parameters` here. None,
        the default, builds what `configure` named.
        """
        return None
