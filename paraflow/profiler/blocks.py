"""What backward needs of each block of a model, and what each takes: measured, or estimated without running it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from paraflow.buffers import Buffers
from paraflow.data.order import preserved_random_state
from paraflow.parts import is_spread
from paraflow.planner.blocks import Profile
from paraflow.profiler.accounts import profile_of
from paraflow.profiler.operations import Call, Recording, Watch, measured, storage_of, tensors_in

_REPEATS = 4


def measure(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    run: Callable[[], Any],
    context: AbstractContextManager[Any] | None = None,
    *,
    gradients_there: bool = True,
) -> Profile:
    """Measures what forward keeps and takes, block by block, without ever holding the activations of two.

    Each block's forward is run a few times where the model calls it, with gradients, and its graph is dropped; the
    model goes on with the block's outputs. What lies outside the blocks is run once. Random state, buffers and modes
    are afterwards as before, and no gradient is computed.

    Args:
        module: The model.
        blocks: Parts of it by name, none inside another; one that is called several times counts each call.
        run: Runs the model's forward and loss on a batch that is on the model's device.
        context: What forward is run in, such as autocast.
        gradients_there: Whether parameters have gradients already, to which backward adds, as from a step's second
            micro-batch on; else those that it makes are left to the caller to count.

    Returns:
        The model's parts in the order in which they were called. Bytes are exact but for the gradients in
        ``whole``, which are estimated; seconds are those of the quickest of a few runs, and blocks that are alike have
        the same.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
        >>> profile = measure(model, {"1": model[1]}, lambda: model(torch.ones(2, 4)).sum())
        >>> [(part.name, part.kept) for part in profile.parts]
        [('', 32), ('1', 64), ('', 0)]
    """
    device = _device_of(module)
    watch = Watch(memory_of(module), measured(device))
    timer = _Timer(device)
    with as_before(module), _gathered_noted(module, watch), replaced(blocks, Probe(watch, timer)):
        watched(watch, run, context)
    return profile_of(watch.parts, gradients_there=gradients_there)


@contextmanager
def _gathered_noted(module: nn.Module, watch: Watch) -> Iterator[None]:
    """Counts what a sharded model gathers as its parameters, which it is, wherever they are gathered."""
    hooks = []
    if any(is_spread(parameter) for parameter in module.parameters()):

        def note(layer: nn.Module, args: Any) -> None:
            found = (storage_of(parameter) for parameter in layer.parameters(recurse=False))
            watch.own |= {storage._cdata: storage for storage in found}

        # Behind those that gather: they come first.
        hooks = [layer.register_forward_pre_hook(note) for layer in module.modules() if layer._parameters]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _device_of(module: nn.Module) -> torch.device:
    """Where a module is run: parameters may wait on the host while it runs on a device."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type not in ("cpu", "meta"):
            return tensor.device
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


@contextmanager
def as_before(module: nn.Module) -> Iterator[None]:
    """Runs a block in training mode; buffers, modes and the random state are as before afterwards."""
    buffers, modes = Buffers(module), [(layer, layer.training) for layer in module.modules()]
    buffers.keep()
    device = _device_of(module)
    devices = [device] if device.type == "cuda" else []
    if not module.training:  # parts that were set to evaluation by themselves stay so
        module.train()
    try:
        with preserved_random_state(), torch.random.fork_rng(devices):
            yield
    finally:
        for layer, training in modes:
            layer.training = training
        buffers.put_back()


def watched(watch: Watch, run: Callable[[], Any], context: AbstractContextManager[Any] | None) -> None:
    """Runs a model's forward and records it."""
    with (
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(watch.note, lambda tensor: tensor),
        context or nullcontext(),
        watch,
    ):
        returned = run()
    watch.part.close()
    for part in watch.parts:
        part.seconds = part.seconds or sum(call.seconds for call in part.calls)
    if not isinstance(returned, torch.Tensor):  # more than a loss, such as the predictions that metrics are made of
        watch.part.outputs = {s._cdata: s for s in map(storage_of, tensors_in(returned))}


def memory_of(*modules: nn.Module) -> dict[int, torch.UntypedStorage]:
    """Returns the memory of parameters and buffers, by key."""
    found = (storage_of(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return {storage._cdata: storage for storage in found}


@contextmanager
def replaced(blocks: Mapping[str, nn.Module], probe: Probe) -> Iterator[None]:
    """Puts the probe in the place of each block's forward."""
    before = {name: block.__dict__.get("forward") for name, block in blocks.items()}
    try:
        for name, block in blocks.items():
            block.forward = probe.around(name, block)
        yield
    finally:
        for name, block in blocks.items():
            own = before[name]
            if own is None:
                del block.forward
            else:
                block.forward = own


class _Timer:
    """Seconds on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    def seconds_of(self, run: Callable[[], Any]) -> float:
        began = self.now()
        run()
        return self.now() - began


@dataclass
class Probe:
    """Runs a block in its place: unrecorded to warm up, recorded, and timed.

    Args:
        watch: What records.
        timer: What times; None where nothing is really run.
    """

    watch: Watch
    timer: _Timer | None = None
    _inside: bool = field(default=False, init=False)

    def around(self, name: str, block: nn.Module) -> Callable[..., Any]:
        """Returns what is called in the place of a block's forward."""
        forward = block.forward

        def probe(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # a block in a block is a part of it
                return forward(*args, **kwargs)

            def run() -> Any:
                torch.clear_autocast_cache()  # or a weight would be cast in the first run only
                return forward(*args, **kwargs)

            self._inside = True
            try:
                # A sharded block's weights are whole only now.
                self.watch.own |= memory_of(block)
                return self._probe(name, list(tensors_in(args, kwargs)), run)
            finally:
                self._inside = False

        return probe

    def _probe(self, name: str, inputs: list[torch.Tensor], run: Callable[[], Any]) -> Any:
        if self.timer is None:
            return self._recorded(name, inputs, run)
        timer, earlier = self.timer, []
        self.watch.paused(run)
        for _ in range(_REPEATS - 1):
            self._recorded(name, inputs, run)
            self.watch.drop()
            earlier.append(self.watch.part.calls)
            self.watch.drop()
        outputs = self._recorded(name, inputs, run)
        part = self.watch.parts[-2]
        # The quickest: what else the machine did is not the block's.
        part.seconds = min(self.watch.paused(lambda: timer.seconds_of(run)) for _ in range(_REPEATS))
        _settle(part, earlier)
        return outputs

    def _recorded(self, name: str, inputs: list[torch.Tensor], run: Callable[[], Any]) -> Any:
        part = self.watch.begin(name, inputs)
        outputs = run()
        part.leave(tensors_in(outputs))
        self.watch.begin("", ())
        return self.watch.paused(lambda: _cut(outputs))


def _settle(part: Recording, earlier: list[list[Call]]) -> None:
    """Gives each call the least that it took, made to add up to the block's seconds: to watch takes time too."""
    runs = [calls for calls in (*earlier, part.calls) if len(calls) == len(part.calls)]
    for call, *others in zip(part.calls, *runs, strict=True):
        call.seconds = min(other.seconds for other in others)
    watched = sum(call.seconds for call in part.calls)
    for call in part.calls:
        call.seconds *= part.seconds / watched if watched else 0.0


class _Stand(torch.autograd.Function):
    """Stands in a graph for what a tensor was computed by."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, held: list[torch.Tensor]) -> torch.Tensor:
        return held[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None


def _cut(outputs: Any) -> Any:
    """Returns the same tensors without their graph; they still need gradients, and can be written to."""
    anchor = torch.zeros((), requires_grad=True)

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        return _Stand.apply(anchor, [tensor.detach()])  # type: ignore[no-any-return, no-untyped-call]

    return tree_map_only(torch.Tensor, cut, outputs)
