"""Scopes: which layers of a model are replicated, split over ranks, or a stage of a pipeline, said where they are made.

    with pf.replica():                      with pf.pipeline(micro_batches=4):
        self.features = resnet50()              with pf.stage():
    with pf.split():                                a = make_encoder()
        self.head = nn.Linear(2048, 100_000)    with pf.stage():
                                                    b = make_decoder()

A scope marks the modules that are made or registered inside it, and changes nothing else: no name, no value, no key of
a state. What the marks mean for a world of several ranks is in `paraflow.scope_plans`; one process passes them over.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import _GeneratorContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from paraflow.errors import PlanError

Kind = Literal["replica", "split", "stage", "pipeline", "auto_parallel"]

_OF_MODULE = "_paraflow_scope"
_OF_PARAMETERS = "_paraflow_scope_of_parameters"


@dataclass(eq=False)
class Scope:
    """One scope that was opened.

    Attributes:
        kind: Which one.
        parent: The scope it was opened in, or None.
        devices: The ranks it takes, where that was said.
        dim: Of a split: the dimension of a weight that is divided, where that was said.
        micro_batches: Of a pipeline: micro-batches for one optimizer step, where that was said.
        schedule: Of a pipeline: the name of its schedule, where that was said.
        children: The scopes that were opened in it, in order.
    """

    kind: Kind
    parent: Scope | None = None
    devices: int | None = None
    dim: int | None = None
    micro_batches: int | None = None
    schedule: str | None = None
    children: list[Scope] = field(default_factory=list, repr=False)

    @property
    def outermost(self) -> Scope:
        """The scope around all others that this one is in."""
        return self if self.parent is None else self.parent.outermost

    def inside(self, kind: Kind) -> Scope | None:
        """Returns the nearest scope of a kind that this one is in, itself included, or None.

        Example:
            >>> outer = Scope("pipeline")
            >>> Scope("stage", outer).inside("pipeline") is outer
            True
        """
        if self.kind == kind:
            return self
        return None if self.parent is None else self.parent.inside(kind)

    def within(self, other: Scope) -> bool:
        """Whether this is another scope, or was opened somewhere inside it."""
        return self is other or (self.parent is not None and self.parent.within(other))

    def __str__(self) -> str:
        """The scopes from the outermost to this one, such as ``replica{split}``."""
        names, scope = [], self
        while True:
            names.append(scope.kind if scope.devices is None else f"{scope.kind}({scope.devices})")
            if scope.parent is None:
                return "{".join(reversed(names)) + "}" * (len(names) - 1)
            scope = scope.parent

    def __deepcopy__(self, memo: dict[int, Any]) -> Scope:
        """A copy of a module is in the scope that the module is in."""
        return self


_open: ContextVar[Scope | None] = ContextVar("paraflow_scope", default=None)
_hooks_there = threading.Event()


def replica(n: int | None = None) -> _GeneratorContextManager[Scope]:
    """Marks what is made inside as one replica of data parallelism: its gradients are averaged over all replicas.

    Args:
        n: The ranks that one replica takes: as many as the scopes inside need, which is refused otherwise. None counts
            them; a split inside that says no number takes all n.

    Returns:
        A context manager, which a function that builds a module can be decorated with, too.

    Raises:
        PlanError: It is opened inside a scope that cannot hold it; so with the other scopes.

    Example:
        >>> with replica():
        ...     layer = nn.Linear(2, 2)
        >>> str(scope_of(layer))
        'replica'
    """
    return _scope("replica", devices=_count("replica(n)", n))


def split(n: int | None = None, dim: int | None = None) -> _GeneratorContextManager[Scope]:
    """Marks what is made inside as split over ranks: each holds a part of every layer, and they compute it together.

    Inside a replica (or a stage) the ranks of that replica share one batch: tensor parallelism. Beside a replica, the
    layers are split over the data ranks, which bring their inputs together for them.

    Args:
        n: Over how many ranks; None takes all that are left.
        dim: Which dimension of a linear layer's weight [out_features, in_features] is divided: 0 or 1. None chooses.
    """
    if dim not in (None, 0, 1):
        raise PlanError(f"split(dim=...) must be 0 (output features), 1 (input features) or None, not {dim!r}.")
    return _scope("split", devices=_count("split(n)", n), dim=dim)


def stage() -> _GeneratorContextManager[Scope]:
    """Marks what is made inside as one stage of the pipeline it stands in."""
    return _scope("stage")


def pipeline(micro_batches: int | None = None, schedule: str | None = None) -> _GeneratorContextManager[Scope]:
    """Marks what is made inside as a pipeline, whose stages are the `stage` scopes in it, in order.

    Args:
        micro_batches: Micro-batches for one optimizer step: the plan's ``accumulate``.
        schedule: The name of a schedule, such as ``"gpipe"`` or ``"1f1b"``; None takes the default.
    """
    return _scope("pipeline", micro_batches=_count("pipeline(micro_batches)", micro_batches), schedule=schedule)


def auto_parallel() -> _GeneratorContextManager[Scope]:
    """Marks what is made inside as laid out by itself: replicas where the model fits on a rank, else stages too."""
    return _scope("auto_parallel")


def scope_of(module: nn.Module) -> Scope | None:
    """Returns the scope that a module was made or registered in, or None: its own mark, not that of what holds it."""
    own: Scope | None = module.__dict__.get(_OF_MODULE)
    if own is not None:
        return own
    marks = set(module.__dict__.get(_OF_PARAMETERS, {}).values())
    return marks.pop() if len(marks) == 1 else None


def scopes_of_tensors(module: nn.Module) -> dict[str, Scope]:
    """Returns the scope of each parameter and buffer of a model, by name; those in no scope are left out.

    A module's mark holds for all that is in it, but for what is marked as in a scope further inside, or in another one.

    Example:
        >>> with replica():
        ...     body = nn.Linear(2, 2)
        >>> with split():
        ...     head = nn.Linear(2, 9, bias=False)
        >>> {name: scope.kind for name, scope in scopes_of_tensors(nn.Sequential(body, head)).items()}
        {'0.weight': 'replica', '0.bias': 'replica', '1.weight': 'split'}
    """
    found: dict[str, Scope] = {}

    def visit(prefix: str, module: nn.Module, around: Scope | None) -> None:
        around = _inner(module.__dict__.get(_OF_MODULE), around)
        own = module.__dict__.get(_OF_PARAMETERS, {})
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            scope = _inner(own.get(name), around)
            if tensor is not None and scope is not None:
                found[prefix + name] = scope
        for name, child in module._modules.items():
            if child is not None:
                visit(f"{prefix}{name}.", child, around)

    visit("", module, None)
    return found


def _inner(own: Scope | None, around: Scope | None) -> Scope | None:
    """Which of a mark and that of what is around it holds: the one further inside, else the mark."""
    return around if own is None or (around is not None and around.within(own)) else own


def _count(what: str, n: object) -> int | None:
    if n is None or (isinstance(n, int) and not isinstance(n, bool) and n >= 1):
        return n
    raise PlanError(f"{what} must be a whole number of at least 1, or None, not {n!r}.")


@contextmanager
def _scope(kind: Kind, **said: Any) -> Iterator[Scope]:
    parent = _open.get()
    _require_room(kind, parent)
    scope = Scope(kind, parent, **said)
    if parent is not None:
        parent.children.append(scope)
    _install_hooks()
    token = _open.set(scope)
    try:
        yield scope
    finally:
        _open.reset(token)


def _require_room(kind: Kind, parent: Scope | None) -> None:
    around = None if parent is None else parent.kind
    if kind in _INSIDE and around in _INSIDE[kind]:
        return
    where = "outside of any scope" if parent is None else f"inside {parent}"
    raise PlanError(f"{kind}() was opened {where}. {_reason(kind, around)}")


def _reason(kind: Kind, around: Kind | None) -> str:
    if kind == around:
        return f"A {kind} does not hold another; end the first, or leave out the second."
    if around == "auto_parallel":
        return "auto_parallel() lays out all that is in it by itself; leave out the one or the other."
    return _REASONS[kind]


_INSIDE: dict[Kind, tuple[Kind | None, ...]] = {
    "replica": (None,),
    "split": (None, "replica", "stage"),
    "stage": ("pipeline",),
    "pipeline": (None, "replica"),
    "auto_parallel": (None,),
}
"""What each scope can be opened in; None is outside of any."""

_REASONS: dict[Kind, str] = {
    "replica": "A replica is a whole model, or what stands beside a split; write it outermost: replica{split}, "
    "replica{pipeline{stage, stage}}.",
    "split": "In a pipeline each layer belongs to a stage; open the split in one: pipeline{stage{split}, stage}.",
    "stage": "A stage is a part of a pipeline; write `with pf.pipeline():` directly around the stages.",
    "pipeline": "A pipeline holds stages, and no stage or split is cut into stages again; open it outermost or in a "
    "replica.",
    "auto_parallel": "auto_parallel() lays out a whole model by itself; open it outermost.",
}


def _install_hooks() -> None:
    """Once in a process: outside of a scope they do nothing."""
    if _hooks_there.is_set():
        return
    _hooks_there.set()
    register_module_module_registration_hook(_mark_module)
    register_module_parameter_registration_hook(_mark_parameter)


def _mark_module(owner: nn.Module, name: str, module: nn.Module | None) -> None:
    scope = _open.get()
    if scope is None or module is None:
        return
    known = module.__dict__.get(_OF_MODULE)
    if known is None or scope.within(known):
        module.__dict__[_OF_MODULE] = scope


def _mark_parameter(owner: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    # A module that is made here and registered elsewhere is known by its parameters.
    scope = _open.get()
    if scope is None or parameter is None:
        return
    known = owner.__dict__.setdefault(_OF_PARAMETERS, {})
    if name not in known or scope.within(known[name]):
        known[name] = scope
