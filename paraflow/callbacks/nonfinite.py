"""Finding what is not finite first: in the parameters, the batch, the modules' outputs, the loss or the gradients."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paraflow.callbacks.rerun import forward_again, undisturbed
from paraflow.data.batch import children
from paraflow.errors import some_of
from paraflow.loss import read_step
from paraflow.pipelining.absent import Absent

if TYPE_CHECKING:
    from paraflow.engine import Engine

_MOST = 3  # names in one finding


def in_parameters(engine: Engine) -> str:
    """Returns what is said of parameters that are not finite themselves, or nothing."""
    names = [name for name, p in engine.module.named_parameters() if not _is_finite(p)]
    return f"it has parameters that are not finite already: {_some(names)}" if names else ""


def in_forward(engine: Engine) -> str:
    """Runs the forward of this rank's micro-batches again, and returns what is said of the first that is not finite.

    A module is named if its output is not finite where its inputs are: the innermost, in the order of execution. Every
    rank calls this alike, for under some plans the forward communicates; what it raises is part of what is said. The
    ranks of a pipeline have one loss, and say of it that it was the first only where none of them has found anything.
    """
    said: dict[str, None] = {}
    losses: dict[str, None] = {}
    with undisturbed(engine), torch.no_grad():
        for micro in engine.batch.micro_batches:
            watch = _Watch(engine.module)
            try:
                loss = read_step(forward_again(engine, micro.data), micro.samples).loss
            except Exception as error:
                said[f"its forward, run again, raised {type(error).__name__}: {error}"] = None
                continue
            finally:
                watch.close()
            fields = [name for name, tensor in _fields("batch", micro.data) if not _is_finite(tensor)]
            if micro.samples and fields:
                said[f"its data is not finite: {_some(fields)}"] = None
            if watch.found:
                said[f"the output of {_some(watch.found)} is not finite, and its inputs are"] = None
            if micro.samples and not fields and not watch.found and not _is_finite(loss):
                losses[f"its loss is {loss.item()}, and the outputs of all modules are finite"] = None
    if engine.mesh.degree("pp") == 1 or not any(engine.mesh.gather_texts("; ".join(said), ("pp",))):
        said |= losses
    return "; ".join(said)


def in_backward(engine: Engine) -> str:
    """Runs forward and backward of this rank's micro-batches again, and returns what is said of their gradients.

    Under a plan that spreads parameters over ranks the gradients of the step are looked at instead, which hold what
    came from every rank.
    """
    if engine.partition_dims:
        names = [name for name, p in engine.module.named_parameters() if p.grad is not None and not _is_finite(p.grad)]
        return f"its part of the gradients of {_some(names[::-1])} is not finite" if names else ""
    named = {id(p): name for name, p in engine.module.named_parameters()}
    said: dict[str, None] = {}
    with undisturbed(engine), torch.enable_grad():
        for micro in engine.batch.micro_batches:
            watch = _Watch(engine.module)
            try:
                loss = read_step(forward_again(engine, micro.data), micro.samples).loss
                # Not backward: it would call what data parallelism hangs on the parameters, and change gradients.
                gradients = torch.autograd.grad(loss, engine.parameters, allow_unused=True)
            except Exception as error:
                said[f"its backward, run again, raised {type(error).__name__}: {error}"] = None
                continue
            finally:
                watch.close()
            pairs = zip(engine.parameters, gradients, strict=True)
            bad = {named[id(p)] for p, gradient in pairs if gradient is not None and not _is_finite(gradient)}
            if micro.samples and bad:
                names = [name for name in watch.backward_order() if name in bad]
                said[f"its forward is finite, and the gradients of {_some(names)} are not"] = None
    return "; ".join(said)


class _Watch:
    """Notes while a forward runs in which order modules are done, and which make what is not finite."""

    def __init__(self, module: nn.Module) -> None:
        self.found: list[str] = []
        self._names: list[str] = []
        self._module = module
        self._done: dict[str, int] = {}
        self._count = itertools.count()
        self._hooks = [
            part.register_forward_hook(partial(self._note, name), with_kwargs=True)
            for name, part in module.named_modules()
        ]

    def _note(self, name: str, part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._done[name] = next(self._count)
        if any(_inside(found, name) for found in self._names):
            return
        if any(_is_elsewhere(tensor) for tensor in _tensors((args, kwargs, output))):
            return  # it reaches over stages of a pipeline; on each the parts that are there are looked at
        with torch._C.DisableTorchFunction():  # a look is no part of the step that a pipeline follows
            # Masks are made of minus infinity, so at first an input of it does not excuse a module.
            is_clean = _is_finite if self.found else _is_finite_or_mask
            if all(map(_is_finite, _tensors(output))) or not all(map(is_clean, _tensors((args, kwargs)))):
                return
        self._names.append(name)
        self.found.append(f"{name or 'the model'} ({type(part).__name__})")

    def close(self) -> None:
        """Takes the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def backward_order(self) -> Iterator[str]:
        """Yields the names of parameters, those of the module that was done last first."""
        names = [name for name, _ in self._module.named_parameters()]
        done = {name: (self._done.get(name.rpartition(".")[0], -1), place) for place, name in enumerate(names)}
        return iter(sorted(names, key=lambda name: done[name], reverse=True))


def _inside(name: str, container: str) -> bool:
    return not container or name.startswith(f"{container}.")


def _is_elsewhere(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, Absent) and tensor.present is None


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all is finite of a tensor; of what is divided over ranks, of this rank's part."""
    here = _here(tensor)
    return not (here.is_floating_point() or here.is_complex()) or bool(torch.isfinite(here).all())


def _is_finite_or_mask(tensor: torch.Tensor) -> bool:
    here = _here(tensor)
    return _is_finite(here) or (here.is_floating_point() and not bool((here.isnan() | here.isposinf()).any()))


def _here(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, looked at without a message to others, who may not look."""
    here: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return getattr(here, "local", here).detach()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    for child in children(value):
        yield from _tensors(child)


def _fields(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of a batch by how one would write them: ``batch['x'][0]``."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from _fields(f"{path}[{key!r}]", child)
    elif isinstance(value, (tuple, list)):
        for place, child in enumerate(value):
            yield from _fields(f"{path}[{place}]", child)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _fields(f"{path}.{field.name}", getattr(value, field.name))


def _some(names: Sequence[str]) -> str:
    return some_of(names, _MOST)
