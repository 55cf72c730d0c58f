"""A task: any module, seen as something that can be trained."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paraflow.errors import ModelError
from paraflow.models.recipe import Recipe, recipe_of
from paraflow.models.step import call_with_inputs, supervised_step
from paraflow.optim import build_optimizer, build_schedule
from paraflow.optim.empty import may_be_empty
from paraflow.outline import outline_of


class Task:
    """What the engine needs of a module: its steps, its metrics, its optimizer.

    A module's own methods are used where it has them (a `paraflow.Model` has them all); a plain module gets the default
    of each.

    Args:
        module: The module to train.

    Attributes:
        module: That module, unwrapped.
        training_step: From a micro-batch to its loss.
        validation_step: The same in evaluation.
        predict_step: From a micro-batch to its output.
    """

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise ModelError(f"A model must be a torch.nn.Module, not a {type(module).__name__}.")
        _refuse_wrapped(module)
        _require_shapes(module)
        self.module = module
        self.training_step: Callable[[Any], Any] = getattr(module, "training_step", None) or self._supervised_step()
        self.validation_step: Callable[[Any], Any] = getattr(module, "validation_step", None) or self.training_step
        self.predict_step: Callable[[Any], Any] = getattr(module, "predict_step", None) or partial(
            call_with_inputs, module
        )

    def _supervised_step(self) -> Callable[[Any], Any]:
        return partial(supervised_step, self.module, self.recipe.loss_function)

    @property
    def recipe(self) -> Recipe:
        """What was said of the module by `paraflow.configure`."""
        return recipe_of(self.module)

    def metrics(self) -> Sequence[Any] | Mapping[str, Any]:
        """Returns the metrics that were asked for."""
        own = getattr(self.module, "metrics", None)
        if isinstance(own, (list, tuple, Mapping, nn.ModuleDict)):
            return dict(own.items()) if isinstance(own, nn.ModuleDict) else own
        specs: Sequence[Any] | Mapping[str, Any] = own() if inspect.ismethod(own) else self.recipe.metrics
        return specs

    def build_optimizer(self, total_steps: int | None) -> tuple[Optimizer, LRScheduler | None]:
        """Builds the optimizer over the parameters as they are now, and its schedule.

        Args:
            total_steps: The optimizer steps of the run, or None where their number is not known.

        Raises:
            ModelError: The module's `configure_optimizers` returns something else, or there is nothing to train.
        """
        own = getattr(self.module, "configure_optimizers", None)
        is_stage = outline_of(self.module) is not None
        with may_be_empty() if is_stage else nullcontext():
            returned = own() if callable(own) else None
        recipe = self.recipe
        optimizer, schedule = _unpack(returned, recipe.schedule)
        if optimizer is None:
            optimizer = build_optimizer(
                recipe.optimizer,
                self.module.named_parameters(),
                lr=recipe.lr,
                weight_decay=recipe.weight_decay,
                is_stage=is_stage,
                **recipe.optimizer_options,
            )
        if schedule is None and recipe.warmup:
            schedule = "constant"
        if schedule is None:
            return optimizer, None
        return optimizer, build_schedule(schedule, optimizer, total_steps=total_steps, warmup=recipe.warmup)


def _is_pair(returned: Any) -> bool:
    """Whether something is (optimizer, schedule)."""
    is_pair = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], Optimizer)
    return is_pair and not isinstance(returned[1], Optimizer)


def _refuse_wrapped(module: nn.Module) -> None:
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    if isinstance(module, (DataParallel, DistributedDataParallel)):
        raise ModelError(
            f"The model is wrapped in {type(module).__name__} already; give the module inside (model.module). Paraflow "
            "wraps it as the plan says."
        )


def _require_shapes(module: nn.Module) -> None:
    lazy = [name for name, tensor in chain(module.named_parameters(), module.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise ModelError(
            f"{', '.join(lazy[:5])} of {type(module).__name__} have no shape before a first forward, as those of "
            "nn.LazyLinear, and neither ranks nor an optimizer can be given them. Run one before: model(inputs)."
        )


def _unpack(returned: Any, schedule: Any) -> tuple[Optimizer | None, Any]:
    """Returns the optimizer and the schedule of what `configure_optimizers` may return."""
    if returned is None:
        return None, schedule
    if isinstance(returned, Optimizer):
        return returned, schedule
    if _is_pair(returned):
        return returned  # type: ignore[no-any-return]
    raise ModelError(
        f"configure_optimizers returned a {type(returned).__name__}; return one optimizer, or a pair "
        "(optimizer, schedule). Paraflow trains with one optimizer: give parameters their own settings in its groups."
    )
