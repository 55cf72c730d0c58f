"""What each part of a module holds and costs: parameters, and the FLOPs and activation bytes of a forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paraflow.data.batch import children
from paraflow.data.order import preserved_random_state

Shape = tuple[int, ...]
Forward = Callable[[], Any]


@dataclass(frozen=True)
class ModuleRow:
    """One module of a model, with all that is inside it.

    A parameter that several modules share is counted once, in the first that holds it, and so is memory that several
    modules keep; so the rows of a model's children add up to no more than the model's own.

    Attributes:
        path: The module's name in the model, such as ``"encoder.0"``; empty for the model itself.
        kind: The name of its class.
        depth: How deep it lies: 0 for the model itself.
        output_shape: The shape of the first tensor it returned, or None where it was not called.
        trainable: Parameters that are trained.
        frozen: Parameters that are not.
        shared: Parameters it holds that were counted in a module before it.
        flops: Floating-point operations of the forward, a multiplication and an addition counted as two; None where
            none was run. Counted are matrix products, convolutions and attention.
        activation_bytes: Bytes that the forward keeps for backward, or None where none was run.
    """

    path: str
    kind: str
    depth: int
    output_shape: Shape | None
    trainable: int
    frozen: int
    shared: int
    flops: int | None
    activation_bytes: int | None

    @property
    def parameters(self) -> int:
        """All its parameters that are counted here, trained or not."""
        return self.trainable + self.frozen


def summarise(
    module: nn.Module,
    forward: Forward | None = None,
    *,
    context: AbstractContextManager[Any] | None = None,
    shapes: Mapping[str, Shape] | None = None,
    depth: int | None = None,
) -> list[ModuleRow]:
    """Returns a row a module, outer to inner in the order of their names; the first is the model's own.

    Nothing is left of the forward: buffers and random state are put back, and no gradient is computed.

    Args:
        module: The model, in the mode in which it is to be measured.
        forward: Runs it on a micro-batch and returns what it gave; without one only parameters are counted.
        context: What the forward is run in, such as autocast.
        shapes: The shapes of parameters by name, where the module holds only parts of them.
        depth: How deep the rows go; None for all.

    Example:
        >>> net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
        >>> rows = summarise(net, lambda: net(torch.zeros(7, 10)).sum())
        >>> [(row.path, row.output_shape, row.parameters, row.flops, row.activation_bytes) for row in rows]
        [('', (7, 5), 325, 4200, 840), ('0', (7, 20), 220, 2800, 280), ('1', (7, 20), 0, 0, 560),
         ('2', (7, 5), 105, 1400, 0)]
    """
    costs = None if forward is None else _measured(module, forward, context or nullcontext())
    held = _parameters(module, shapes or {})
    rows = []
    for path, part in module.named_modules():
        level = path.count(".") + 1 if path else 0
        if depth is not None and level > depth:
            continue
        trainable, frozen, shared = (sum(sizes) for sizes in zip(*_inside(held, path), strict=True))
        cost = [None, None] if costs is None else [sum(own) for own in zip(*_inside(costs.own, path), strict=True)]
        shape = None if costs is None else costs.shapes.get(path)
        rows.append(ModuleRow(path, type(part).__name__, level, shape, trainable, frozen, shared, cost[0], cost[1]))
    return rows


def _inside(numbers: Mapping[str, Iterable[int]], path: str) -> Iterator[Iterable[int]]:
    """The numbers of a module and of all that lies inside it."""
    return (own for name, own in numbers.items() if not path or name == path or name.startswith(f"{path}."))


def _parameters(module: nn.Module, shapes: Mapping[str, Shape]) -> dict[str, tuple[int, int, int]]:
    """The (trainable, frozen, shared) parameters that each module holds itself."""
    seen: set[int] = set()
    held: dict[str, tuple[int, int, int]] = {}
    for path, part in module.named_modules():
        sizes = [0, 0, 0]
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            full = f"{path}.{name}" if path else name
            size = math.prod(shapes[full]) if full in shapes else parameter.numel()
            kind = 2 if id(parameter) in seen else 0 if parameter.requires_grad else 1
            sizes[kind] += size
            seen.add(id(parameter))
        held[path] = (sizes[0], sizes[1], sizes[2])
    return held


@dataclass
class _Costs:
    """What a forward cost: (FLOPs, bytes) of each module by itself, and the shapes that they returned."""

    own: dict[str, tuple[int, int]]
    shapes: dict[str, Shape]


def _measured(module: nn.Module, forward: Forward, context: AbstractContextManager[Any]) -> _Costs:
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False, custom_mapping=_attention_on_the_host())
    meter = _Meter(module, counter.get_total_flops)
    with untouched(module), meter.watching(), context, counter:
        # Kept until all is counted: freed memory would be handed out, and taken for what was counted before.
        returned = forward()
        del returned
    return _Costs(meter.own, meter.shapes)


class _Meter:
    """Charges FLOPs and saved memory to the innermost module that is running.

    Args:
        module: The model.
        flops: Returns the FLOPs so far.
    """

    def __init__(self, module: nn.Module, flops: Callable[[], int]) -> None:
        self._module = module
        self._flops = flops
        self._counted = 0
        self._running = [""]
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
        self.own: dict[str, tuple[int, int]] = {path: (0, 0) for path, _ in module.named_modules()}
        self.shapes: dict[str, Shape] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches what is run inside."""
        with ExitStack() as stack:
            for path, part in self._module.named_modules():
                for hook in (
                    part.register_forward_pre_hook(lambda *_, path=path: self._enter(path), prepend=True),
                    part.register_forward_hook(lambda *given, path=path: self._leave(path, given[2])),
                ):
                    stack.callback(hook.remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor))
            yield
            self._charge()

    def _charge(self, saved: int = 0) -> None:
        flops, total = self._flops(), self.own[self._running[-1]]
        self.own[self._running[-1]] = (total[0] + flops - self._counted, total[1] + saved)
        self._counted = flops

    def _enter(self, path: str) -> None:
        self._charge()
        self._running.append(path)

    def _leave(self, path: str, output: Any) -> None:
        self._charge()
        self._running.pop()
        shape = _first_shape(output)
        if shape is not None:
            self.shapes[path] = shape

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self._charge(storage.nbytes())
        return tensor


def _first_shape(output: Any) -> Shape | None:
    if isinstance(output, torch.Tensor):
        return tuple(output.shape)
    return next((shape for shape in map(_first_shape, children(output)) if shape is not None), None)


def _attention_on_the_host() -> dict[Any, Any]:
    """Torch counts attention by its fused kernels, and has no count for the one that runs on a CPU."""
    from torch.utils.flop_counter import sdpa_flop_count

    def count(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]

    return {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: count}


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Runs a block that may run a module forward; its buffers and the random state are as before afterwards."""
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    devices = [tensor.device for tensor in module.parameters() if tensor.is_cuda][:1]
    try:
        with preserved_random_state(), torch.random.fork_rng(devices):
            yield
    finally:
        for name, buffer in module.named_buffers():
            if name in buffers:
                buffer.data.copy_(buffers[name])
