"""The part of a user's step that one stage of a pipeline has, run by running the step.

Every stage runs the user's own, unchanged step. Layers of earlier stages are not run: what they return is absent. What
the own layers need of it has been received, and is put in its place; when the first layer of a later stage is called,
the step is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from paraflow.errors import ModelError
from paraflow.pipelining.absent import Absent, Meta
from paraflow.pipelining.functions import aside, functions_seen
from paraflow.pipelining.running import Left, OwnPart, Running
from paraflow.pipelining.skeleton import Skeleton
from paraflow.pipelining.state import ModuleState, Watch
from paraflow.pipelining.trace import Glue, Tracing, Traffic
from paraflow.pipelining.values import rebuilt, tensors_in
from paraflow.step import Boundary

Inner = Callable[..., Any]


class Replay:
    """Runs the part of a user's step that one stage has.

    Make it while the model is whole: before parameters are taken away, and before layers are split or sharded.

    Args:
        model: The model.
        stages: The names of the units of each stage. A unit is a module that runs on one stage, and is called.
        device: The device that the model runs on; that of its first parameter if None.

    Attributes:
        own_part: Makes the context in which what only one stage has draws random numbers: its units, and functions of
            what they give. All other code draws what all stages draw alike.
        moved: Called in a run when the step goes from one stage to a later one.
        reached: The stage in which the last trace ended, or failed.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> replay = Replay(net, [["0"], ["2"]])
        >>> x = torch.ones(3, 4)
        >>> traffic = replay.trace(lambda: net(x).sum())
        >>> traffic.crossing[0][0].shape
        (3, 8)
        >>> first = replay.run(0, lambda: net(x).sum(), (), traffic)
        >>> last = replay.run(1, lambda: net(x).sum(), [t.detach() for t in first.tensors], traffic)
        >>> torch.equal(last, net(x).sum())
        True
    """

    def __init__(
        self, model: nn.Module, stages: Sequence[Sequence[str]], device: torch.device | str | None = None
    ) -> None:
        self._model = model
        self._stage_of = {name: stage for stage, names in enumerate(stages) for name in names}
        self._count = len(stages)
        if device is None:
            first = next(model.parameters(), None)
            device = "cpu" if first is None or first.is_meta else first.device
        self._skeleton = Skeleton(model, list(self._stage_of), torch.device(device))
        self._stand_ins = {name: Absent.like(slot) for name, slot in self._skeleton.weights.items()}
        self._active: Glue | None = None
        self._callers: dict[str, Inner] = {}
        self.own_part: OwnPart = _no_own_part
        self.moved: Callable[[int, int], None] = lambda before, after: None
        self.reached = 0

    def trace(self, call: Callable[[], Any]) -> Traffic:
        """Finds out what crosses between stages, by a run of the step in which no layer computes.

        Args:
            call: Runs the step on one micro-batch.

        Raises:
            ModelError: The step cannot be run in these stages; the message shows the line.
        """
        self._skeleton.take_modes()
        tracing, watch = Tracing(self._skeleton, self._count), Watch(self.state)
        tracing.moved = lambda before, after: watch.note(before)
        try:
            with _random_state_kept(self._skeleton.device), self._placed(self._places), self._watched(tracing):
                returned = call()
                with aside(tracing):
                    self._require_no_buffer_of_layers(tracing)
                    traffic = tracing.finish(returned)
        finally:
            self.reached = tracing.stage
            watch.note(self._count - 1)
            watch.put_back()
        return replace(traffic, state=watch.written)

    def run(self, stage: int, call: Callable[[], Any], received: Sequence[Tensor], traffic: Traffic) -> Boundary | Any:
        """Runs a stage's part of the step.

        Args:
            stage: The stage.
            call: Runs the step on one micro-batch.
            received: What crosses from the stage before, as `traffic` has it; leaves that require gradients as it says.
            traffic: What was traced of such a micro-batch.

        Returns:
            What goes to the next stage, with its graph; of the last stage what the step returns.

        Raises:
            ModelError: The step does not do what it did when it was traced, or uses a weight that is not here.
        """
        buffers = {id(held[leaf]) for held, leaf in self._buffers}
        running = Running(stage, received, traffic, buffers, self.own_part)
        running.moved = self.moved
        missing = [place for place in self._places if place[0][place[1]] is None]
        with self._placed(missing), self._watched(running):
            try:
                returned = call()
            except Left:
                returned = None
        if stage < self._count - 1:
            return Boundary(running.boundary())
        return self._returned(returned, running, traffic)

    def _returned(self, returned: Any, running: Running, traffic: Traffic) -> Any:
        found, traced = len(tensors_in(returned)), len(tensors_in(traffic.returned, Meta))
        if found != traced:
            raise ModelError(
                f"The step returned {found} tensors, and {traced} when it was traced. Under a pipeline what layers "
                "leave somewhere else than in what they return (forward hooks that collect outputs, as "
                "output_hidden_states and output_attentions of transformers do; attributes) is there on one stage "
                "only. Return it from the layers, or do without it."
            )
        return rebuilt(returned, running.value)

    def weights_used_outside(self, traffic: Traffic) -> Mapping[str, frozenset[int]]:
        """Returns the parameters (and units' buffers) that code outside of units uses, and all stages that use each.

        Names are the first of each, as `named_parameters` has them.
        """
        found = {}
        for name, stages in traffic.weights.items():
            units = {unit for _, unit, _ in self._skeleton.owners[name] if unit is not None}
            found[name] = stages | {self._stage_of[unit] for unit in units}
        return found

    @cached_property
    def _modules(self) -> dict[str, nn.Module]:
        """The units as they are when the first step runs: other plugins may have put others in their place."""
        return {name: self._model.get_submodule(name) for name in self._stage_of}

    @cached_property
    def _places(self) -> list[tuple[dict[str, Any], str, Absent]]:
        """Where each parameter and each buffer of a unit is, and what stands for it."""
        found = []
        for name, owners in self._skeleton.owners.items():
            for path, _, leaf in owners:
                module = self._model.get_submodule(path)
                held: dict[str, Any] = module._parameters if leaf in module._parameters else module._buffers
                found.append((held, leaf, self._stand_ins[name]))
        return found

    @cached_property
    def _buffers(self) -> list[tuple[dict[str, Tensor | None], str]]:
        """Where each buffer of a unit is."""
        owners = (owner for unit in self._modules.values() for owner in unit.modules())
        return [(owner._buffers, leaf) for owner in owners for leaf in owner._buffers]

    @cached_property
    def _outside(self) -> list[tuple[str, nn.Module]]:
        """The modules that are in no unit."""
        within = {module for unit in self._modules.values() for module in unit.modules()}
        return [(name, module) for name, module in self._model.named_modules() if module not in within]

    def _require_no_buffer_of_layers(self, tracing: Tracing) -> None:
        for name, module in self._outside:
            for leaf, tensor in module._buffers.items():
                if tensor is not None and isinstance(tracing.absent_or(tensor), Absent):
                    raise ModelError(
                        f"The buffer '{name + '.' if name else ''}{leaf}' is given values that depend on layers, "
                        "outside of a layer. Under a pipeline it would have them on one stage only. Do it in the "
                        "forward of a module that has parameters and holds the buffer."
                    )

    @cached_property
    def state(self) -> ModuleState:
        """What modules outside of the units keep."""
        return ModuleState(self._outside)

    @contextmanager
    def _placed(self, places: Sequence[tuple[dict[str, Any], str, Absent]]) -> Iterator[None]:
        before = [held[leaf] for held, leaf, _ in places]
        for held, leaf, absent in places:
            held[leaf] = absent
        try:
            yield
        finally:
            for (held, leaf, _), tensor in zip(places, before, strict=True):
                held[leaf] = tensor

    @contextmanager
    def _watched(self, glue: Glue) -> Iterator[None]:
        self._install()
        self._active = glue
        try:
            with glue, functions_seen(glue.custom_function):
                yield
        finally:
            self._active = None

    def _install(self) -> None:
        """Has calls of units come here first; done again where something else was put there since."""
        for name, stage in self._stage_of.items():
            module = self._modules[name]
            there = module.__dict__.get("_compiled_call_impl")
            if there is None or there is not self._callers.get(name):
                self._callers[name] = partial(self._intercept, name, stage, there or module._call_impl)
                module.__dict__["_compiled_call_impl"] = self._callers[name]

    def _intercept(self, name: str, stage: int, inner: Inner, /, *args: Any, **kwargs: Any) -> Any:
        active = self._active
        if active is None:
            # A forward that is run again for its backward is given what the first was given.
            return inner(*rebuilt(args, _present), **rebuilt(kwargs, _present))
        if active.inside:
            return inner(*args, **kwargs)
        active.inside = True
        try:
            with aside(active):
                return active.enter_unit(name, stage, inner, args, kwargs)
        finally:
            active.inside = False


def _no_own_part(*, everything: bool) -> AbstractContextManager[None]:
    return nullcontext()


def _present(tensor: Tensor) -> Tensor:
    return tensor.present if isinstance(tensor, Absent) and tensor.present is not None else tensor


@contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    from paraflow.recompute.generators import GLOBAL_GENERATORS

    states = GLOBAL_GENERATORS.read()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            GLOBAL_GENERATORS.write(states)
