"""What backward needs of each block of a model that is not run: it may be on the meta device, or too large."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paraflow.planner.blocks import Profile
from paraflow.profiler.accounts import profile_of
from paraflow.profiler.blocks import Probe, as_before, memory_of, replaced, watched
from paraflow.profiler.operations import Clock, Watch, storage_of, tensors_in

if TYPE_CHECKING:
    from torch._subclasses import FakeTensorMode


@dataclass(frozen=True)
class Speed:
    """What a device does in a second.

    Attributes:
        flops: Floating-point operations, a multiplication and an addition counted as two.
        bytes: Bytes that it reads or writes in its memory.
        launch: Seconds that an operator takes at least.
    """

    flops: float
    bytes: float
    launch: float = 0.0


def estimate(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    run: Callable[[], Any],
    speed: Speed,
    context: AbstractContextManager[Any] | None = None,
    *,
    device: torch.device | str = "cpu",
) -> Profile:
    """Estimates what `paraflow.profiler.blocks.measure` measures, without memory and without computing anything.

    Bytes are those that a run would keep. An operator takes as long as its arithmetic or its memory traffic does,
    whichever is longer (the roofline of Williams et al. 2009).

    Args:
        module: The model, on any device; it may be the meta device.
        blocks: Parts of it by name, none inside another.
        run: Runs the model's forward and loss on a batch that is on `device`.
        speed: Of the device on which the model is going to be trained.
        context: What forward is run in, such as autocast.
        device: Where the parameters are taken to be.

    Raises:
        torch._subclasses.fake_tensor.DataDependentOutputException: The forward asks for the value of a tensor.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
        >>> profile = estimate(model, {"1": model[1]}, lambda: model(torch.ones(2, 4)).sum(), Speed(1e9, 1e9))
        >>> [(part.name, part.kept) for part in profile.parts]
        [('', 32), ('1', 64), ('', 0)]
    """
    from torch._subclasses import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with as_before(module), _stood_in(module, mode, torch.device(device)):
        watch = Watch(memory_of(module), _roofline(speed))
        with replaced(blocks, Probe(watch)), mode:
            watched(watch, run, context)
    return profile_of(watch.parts)


@contextmanager
def _stood_in(module: nn.Module, mode: FakeTensorMode, device: torch.device) -> Iterator[None]:
    """Puts tensors without memory in the place of parameters and buffers."""
    places: list[tuple[dict[str, Any], str, torch.Tensor]] = [
        (held, name, tensor)
        for part in module.modules()
        for held in (part._parameters, part._buffers)
        for name, tensor in held.items()
        if tensor is not None
    ]
    stands: dict[int, torch.Tensor] = {}
    try:
        for held, name, tensor in places:
            if id(tensor) not in stands:  # one that is used twice stays one
                stands[id(tensor)] = _stand(tensor, mode, device)
            held[name] = stands[id(tensor)]
        yield
    finally:
        for held, name, tensor in places:
            held[name] = tensor


def _stand(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    with mode:
        stand = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(stand, requires_grad=tensor.requires_grad)
    return stand


def _roofline(speed: Speed) -> Clock:
    from paraflow.profiler.flops import formulas

    counts = formulas()

    def clock(run: Callable[[], Any], func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        made = run()
        if getattr(func, "is_view", False):
            return made, 0.0
        count = counts.get(getattr(func, "_overloadpacket", func))
        flops = count(*args, **kwargs, out_val=made) if count is not None else 0
        moved = {(s := storage_of(tensor))._cdata: s.nbytes() for tensor in tensors_in(args, kwargs, made)}
        return made, speed.launch + max(flops / speed.flops, sum(moved.values()) / speed.bytes)

    return clock
