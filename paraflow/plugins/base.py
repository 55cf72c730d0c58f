"""The plugin protocol: what one strategy may do, each with a default that is right for one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from paraflow.rules import Rule

if TYPE_CHECKING:
    from paraflow.data.batch import Batch
    from paraflow.engine import Engine
    from paraflow.loss import StepOutput

State = dict[str, Any]
Part = Literal["both", "forward", "backward"]
"""What of a micro-batch is run inside a context: a plugin that runs micro-batches may run the two apart."""


class Phase(IntEnum):
    """When a plugin acts: plugins are ordered by phase, then by name, never by how the user listed them."""

    STAGE = 0  # leaves out of the model what other ranks run
    SPLIT = 1  # splits single layers over ranks, which compute them together
    PARTITION = 2  # replaces parameters by this rank's part of them, and joins them for use
    PREPARE = 3  # changes how the whole model is run: precision, recomputation, compilation
    DISTRIBUTE = 4  # makes gradients those of all ranks
    OPTIMIZE = 5  # changes what becomes of the gradients


class Plugin:
    """One strategy. Override what it changes; what is not overridden costs nothing in a step.

    A plugin of yours is as good as one of the package: pass it as ``Trainer(plugins=[...])``.

    Attributes:
        may_overflow: Whether gradients that are not finite are expected, and the step is then left out.
        name: What it is called in plans, errors and checkpoints; one plan has one plugin of a name.
        phase: When it acts.
        rules: The rows it adds to the legality table, asked before any process group starts.
        provides: The plan's fields it can stand for, whether or not `fields` gives them a value.
        replaces: The names of the package's own plugins that it does the work of, so that they are left out.
        bytes_held: Bytes on this rank's device that it holds while a step of one micro-batch is run, besides parameters
            and gradients as the model has them: a choice to meet a memory budget counts them.
        bytes_between: How many more where a step has several micro-batches.

    Example:
        >>> class SignOnly(Plugin):
        ...     name = "sign_only"
        ...     def step(self, engine, proceed):
        ...         for parameter in engine.parameters:
        ...             parameter.grad.sign_()
        ...         return proceed()
        >>> SignOnly().overrides("step"), SignOnly().overrides("transform")
        (True, False)
    """

    may_overflow: bool = False
    name: ClassVar[str]
    phase: ClassVar[Phase] = Phase.OPTIMIZE
    rules: ClassVar[tuple[Rule, ...]] = ()
    provides: ClassVar[tuple[str, ...]] = ()
    replaces: ClassVar[tuple[str, ...]] = ()
    bytes_held: int = 0
    bytes_between: int = 0

    @property
    def fields(self) -> Mapping[str, Any]:
        """The plan's fields that this plugin stands for, such as ``{"fsdp": 8}``: it provides them."""
        return {}

    def transform(self, module: nn.Module, engine: Engine) -> nn.Module:
        """Changes the model, or wraps how it is called.

        Args:
            module: Called as ``module(step_name, batch)``; ``engine.module`` is the user's own module inside.
            engine: The engine that is being built; its mesh and plan are there.

        Returns:
            What is called instead.
        """
        return module

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, engine: Engine) -> torch.optim.Optimizer:
        """Changes or wraps the optimizer, which holds the parameters as the transforms left them.

        ``engine.update`` says how it is applied; it can be given other tensors to hold.
        """
        return optimizer

    def calibrate(self, engine: Engine, batch: Batch) -> None:
        """Looks at the first batch before it is trained on: for what depends on the sizes of the data."""

    def micro_batch(self, index: int, count: int, part: Part, last: bool) -> AbstractContextManager[Any]:
        """Returns the context in which a micro-batch is run.

        Args:
            index: Which one it is of the step. Where forwards and backwards are run apart, each are counted in the
                order in which this rank runs them.
            count: How many this rank runs in the step.
            part: What is run inside.
            last: Whether it is the last of the step for the layers that it runs, so that their gradients are whole
                after its backward. A rank that runs several stages of a model has a last one for each.
        """
        return nullcontext()

    def run_micro_batches(self, engine: Engine, batch: Batch) -> list[StepOutput]:
        """Runs forward and backward of a step's micro-batches; one plugin at most replaces it.

        Returns:
            What each gave, losses detached; the same on every rank that holds a part of one replica.
        """
        return engine.run_in_turn(batch)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns what backward starts from, given the loss as the step's mean has it."""
        return loss

    def reduce_gradients(self, engine: Engine) -> None:
        """Makes each gradient the mean over the data ranks, once the last micro-batch is done."""

    def completes_gradient(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether `reduce_gradients` changes a parameter's gradient, so that it is not whole before.

        What no plugin before the one that averages over replicas says so of is averaged while backward goes on.
        """
        return self.overrides("reduce_gradients")

    def partitioned_over(self, name: str, parameter: nn.Parameter) -> Sequence[str] | None:
        """Returns the mesh dimensions over which this rank holds only a part of a parameter, or not every parameter.

        The gradient norm, and what is not finite, are summed over them. None says that another rank along such a
        dimension holds the same parameter, and counts it.
        """
        return ()

    def step(self, engine: Engine, proceed: Callable[[], bool]) -> bool:
        """Acts on the final gradients; ``proceed`` is the rest of the plugins and the optimizer.

        Returns:
            Whether the optimizer stepped.
        """
        return proceed()

    def state_dict(self, state: State, engine: Engine) -> State:
        """Returns the state as one device would hold it: full parameters under the module's own names.

        Args:
            state: ``model`` (by name), ``optimizer``, ``schedule``, and ``plugins`` for what plugins add, by name. A
                sharded tensor (torch's DTensor) stands for the whole.
            engine: The engine.
        """
        return state

    def load_state_dict(self, state: State, engine: Engine) -> State:
        """The reverse: returns this rank's part of a state that one device would hold, and takes the plugin's own.

        Tensors that come from a checkpoint may still be on disk: ``value[slices]`` reads a part, ``value[...]`` all.
        """
        return state

    def describe(self) -> str:
        """Returns one line for the printed plan."""
        return ", ".join(f"{name}={value}" for name, value in self.fields.items()) or self.name

    def overrides(self, method: str) -> bool:
        """Whether the plugin has its own version of a method."""
        return getattr(type(self), method) is not getattr(Plugin, method)


def in_order(plugins: Iterable[Plugin]) -> list[Plugin]:
    """Returns plugins by phase, and by name within a phase."""
    return sorted(plugins, key=lambda plugin: (plugin.phase, plugin.name))
