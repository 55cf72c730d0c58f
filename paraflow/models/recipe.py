"""The recipe: how a module is trained, said by name, by object or by function, beside the module itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from torch import nn

from paraflow.errors import ModelError
from paraflow.models.losses import loss_function

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_ATTRIBUTE = "_paraflow_recipe"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a module is trained.

    Attributes:
        optimizer: A name, an optimizer, or a function from parameters to one (see `paraflow.optim.build_optimizer`).
        lr: The learning rate.
        weight_decay: The weight decay of matrices; None for the optimizer's own default.
        schedule: A name, a scheduler, or a function from the optimizer to one; None for a constant rate.
        warmup: Steps of linear warm-up, or, below 1, their share of all steps.
        loss: A name, or a function (output, target) to a mean loss; None where the model's output has a ``loss``.
        metrics: Names, torchmetrics objects or functions (output, target) to a mean; a mapping names them.
        weight: A function from a batch to the number of items its mean loss is over, where that is not its samples.
        optimizer_options: Further arguments of the optimizer.
    """

    optimizer: Any = "adamw"
    lr: float = 1e-3
    weight_decay: float | None = None
    schedule: Any = None
    warmup: int | float = 0
    loss: str | Callable[..., Any] | None = None
    metrics: Sequence[Any] | Mapping[str, Any] = ()
    weight: Callable[[Any], Any] | None = None
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def loss_function(self) -> Callable[..., Any] | None:
        """The loss, from (output, target), or None."""
        return None if self.loss is None else loss_function(self.loss)

    def __post_init__(self) -> None:
        if isinstance(self.lr, bool) or not isinstance(self.lr, (int, float)) or not self.lr > 0:
            raise ModelError(f"lr must be a number above 0, not {self.lr!r}.")
        if self.warmup < 0:
            raise ModelError(f"warmup must be a number of steps, or a share of them below 1, not {self.warmup!r}.")
        if isinstance(self.metrics, str):
            raise ModelError(f"metrics must be a list or a mapping; write metrics=[{self.metrics!r}].")
        if isinstance(self.loss, type):
            raise ModelError(f"loss is the class {self.loss.__name__}; write {self.loss.__name__}().")
        if self.loss is not None and not isinstance(self.loss, str) and not callable(self.loss):
            raise ModelError(f"loss must be a name or a function (output, target), not a {type(self.loss).__name__}.")
        if self.weight is not None and not callable(self.weight):
            raise ModelError(f"weight must be a function from a batch to a number, not {self.weight!r}.")


def configure(
    module: ModuleT,
    *,
    optimizer: Any = "adamw",
    lr: float = 1e-3,
    weight_decay: float | None = None,
    schedule: Any = None,
    warmup: int | float = 0,
    loss: str | Callable[..., Any] | None = None,
    metrics: Sequence[Any] | Mapping[str, Any] = (),
    weight: Callable[[Any], Any] | None = None,
    **optimizer_options: Any,
) -> ModuleT:
    """Says how a module is trained, and returns it. Any ``nn.Module`` will do; nothing of it is changed.

    Args:
        module: The module.
        optimizer: See `Recipe`, as for all the others.
        lr: The learning rate.
        weight_decay: The weight decay.
        schedule: The learning-rate schedule.
        warmup: Warm-up steps or share.
        loss: The loss.
        metrics: The metrics.
        weight: Items of a batch.
        **optimizer_options: Further arguments of the optimizer, such as ``betas``.

    Example:
        >>> import paraflow as pf
        >>> net = pf.configure(nn.Linear(4, 3), optimizer="sgd", lr=0.1, loss="cross_entropy", metrics=["accuracy"])
        >>> recipe_of(net).lr
        0.1
    """
    recipe = Recipe(
        optimizer=optimizer,
        lr=lr,
        weight_decay=weight_decay,
        schedule=schedule,
        warmup=warmup,
        loss=loss,
        metrics=metrics,
        weight=weight,
        optimizer_options=optimizer_options,
    )
    _require_module(module)
    # Past nn.Module.__setattr__, which would register a loss module's parameters as the model's own.
    module.__dict__[_ATTRIBUTE] = recipe
    return module


def _require_module(module: object) -> None:
    if isinstance(module, nn.Module):
        return
    made = f"; write configure({module.__name__}(...))" if isinstance(module, type) else ""
    raise ModelError(f"configure takes a module, not {module!r}{made}.")


def recipe_of(module: nn.Module) -> Recipe:
    """Returns what `configure` said of a module, or the defaults."""
    recipe: Recipe = module.__dict__.get(_ATTRIBUTE) or _DEFAULT
    return recipe


_DEFAULT = Recipe()
