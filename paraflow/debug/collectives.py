"""Collectives that are compared before they run: ranks that are about to run different ones stop, both named."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paraflow.debug.calls import COLLECTIVES, describe
from paraflow.debug.meeting import Meeting
from paraflow.debug.said import Said
from paraflow.debug.site import call_site

if TYPE_CHECKING:
    from paraflow.mesh import Mesh

Function = Callable[..., Any]


class CollectiveCheck:
    """While it is active, ranks compare which collective each is about to run, and from where.

    What is compared: the name, types and numbers of elements where they must be equal, the reduction, the source or
    destination, the group, the order within the ranks of the group, and the trainer's step. Ranks may call from
    different lines. Calls of `torch.distributed`'s functions by the thread that entered are seen. Not seen are
    point-to-point calls, functional collectives, what is called on a process group itself, and what torch starts
    in C++, as DistributedDataParallel does in backward: `announce` marks those. Whether splits of an all-to-all match
    is not compared.

    Every rank enters and leaves it at the same place of its program. One process has nothing to compare.

    Args:
        mesh: The ranks.
        step: Returns the step that the training has come to.
        patience: For how many seconds a rank that says nothing is waited for.

    Example:
        >>> import torch, paraflow as pf
        >>> from paraflow.mesh import Mesh
        >>> with CollectiveCheck(Mesh(pf.Plan(), torch.device("cpu")), step=lambda: 0) as check:
        ...     check.announce("the start")
    """

    def __init__(self, mesh: Mesh, step: Callable[[], int], patience: float = 60.0) -> None:
        self._mesh = mesh
        self._step = step
        self._patience = patience
        self._meeting: Meeting | None = None
        self._originals: dict[int, Function] = {}
        self._thread = 0
        self._nested = False

    def __enter__(self) -> CollectiveCheck:
        if self._mesh.world_size > 1:
            self._meeting = Meeting(self._mesh.store("debug/collectives"), self._mesh.rank, self._patience)
            self._thread = threading.get_ident()
            self._nested = False
            self._replace()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _exchange(self._originals, inside_torch=True)  # it may have imported a module meanwhile, which took ours
        self._originals = {}
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            with contextlib.suppress(RuntimeError):  # the store may have gone with the rank that serves it
                meeting.leave(error)

    def announce(self, what: str) -> None:
        """Waits until every rank of the world has come to the same place of the program.

        Args:
            what: What happens there: ``"backward of micro-batch 0: gradients are averaged"``. It must be the same on
                every rank.

        Raises:
            ParaflowError: A rank is elsewhere, about to run a collective, or has left.
        """
        if self._is_due():
            self._meet(tuple(range(self._mesh.world_size)), what, f"announced {what}", announced=True)

    def _is_due(self) -> bool:
        return self._meeting is not None and not self._nested and threading.get_ident() == self._thread

    def _meet(
        self, ranks: tuple[int, ...], what: str, key: str, *, announced: bool = False, symmetric: bool = False
    ) -> None:
        assert self._meeting is not None
        said = Said(
            self._mesh.rank,
            what=what,
            key=key,
            site=call_site(),
            step=self._step(),
            announced=announced,
            symmetric=symmetric,
        )
        self._meeting.meet(ranks, said)

    def _replace(self) -> None:
        """Puts a checked function wherever a collective is held under its name or another, but for torch's inside."""
        importlib.import_module("torch.distributed._functional_collectives")  # its table must hold the originals
        originals = [(name, getattr(dist.distributed_c10d, name, None)) for name in COLLECTIVES]
        checked = {id(original): self._checked(name, original) for name, original in originals if original is not None}
        self._originals = {id(checked[id(original)]): original for _, original in originals if original is not None}
        _exchange(checked, inside_torch=False)

    def _checked(self, name: str, original: Function) -> Function:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            if not self._is_due():
                return original(*args, **kwargs)
            self._compare(name, signature, args, kwargs)
            self._nested = True
            try:
                return original(*args, **kwargs)
            finally:
                self._nested = False

        function._torchdynamo_disable = True  # type: ignore[attr-defined]  # a call of it is not compiled
        if "torch._dynamo" not in sys.modules:  # it takes long to import
            return function
        disabled: Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled

    def _compare(self, name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return  # torch will say so
        bound.apply_defaults()
        call = describe(name, bound.arguments)
        if call is not None and len(call.ranks) > 1:
            self._meet(call.ranks, call.what, call.key, symmetric=call.symmetric)


def _exchange(functions: dict[int, Function], *, inside_torch: bool) -> None:
    """Puts functions in the place of those with the given ids, in all modules that are loaded."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        name = str(names.get("__name__"))
        inside = name.startswith("torch.") and name not in (dist.__name__, dist.distributed_c10d.__name__)
        if inside_torch or not inside:
            for held, value in list(names.items()):
                if id(value) in functions:
                    names[held] = functions[id(value)]
