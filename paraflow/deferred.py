"""Building a model without memory for its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from paraflow.births import Recorded, remember
from paraflow.errors import ModelError
from paraflow.recording import (
    Node,
    RandomState,
    cell_of,
    evaluate,
    give_cell,
    heads_in,
    tensors_in,
    view_of,
)
from paraflow.seen_as_on_host import SeenAsOnHost, Session

_LARGE = 4096  # elements; what is smaller costs nothing to have
_HOST, _META = torch.device("cpu"), torch.device("meta")
_aten = torch.ops.aten
_UNINITIALISED = {_aten.empty, _aten.empty_strided, _aten.empty_permuted, _aten.empty_like, _aten.new_empty}
_UNINITIALISED |= {_aten.new_empty_strided}
_OVERWRITES = {_aten.normal_, _aten.uniform_, _aten.random_, _aten.exponential_, _aten.log_normal_, _aten.cauchy_}
_OVERWRITES |= {_aten.geometric_, _aten.fill_, _aten.zero_, _aten.copy_}


@contextmanager
def deferred_init() -> Iterator[None]:
    """Builds modules whose large parameters have no memory yet.

    What is done to them is written down instead of done. The Trainer does it when it has laid the model out, one
    parameter at a time, and each rank keeps its part. Random numbers are those that would have been drawn here, so
    the model is bit for bit the one that is built without `deferred_init` after the same `pf.seed`. Small tensors,
    buffers and all else that is computed are real at once.

    Change the parameters inside the block, with initialisers for instance: outside it nothing is written down.

    Example:
        >>> with deferred_init():
        ...     layer = nn.Linear(512, 512)
        >>> layer.weight.device, layer.bias.device
        (device(type='meta'), device(type='cpu'))
    """
    session = Session()

    def take_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        with torch._C.DisableTorchFunction():
            if parameter is not None and cell_of(parameter) is not None:
                session.owners[id(parameter)] = parameter

    def take_buffer(module: nn.Module, name: str, buffer: torch.Tensor | None) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            if buffer is None or cell_of(buffer) is None:
                return None
            return evaluate(view_of(buffer)).clone()

    with ExitStack() as stack:
        for handle in (
            register_module_parameter_registration_hook(take_parameter),
            register_module_buffer_registration_hook(take_buffer),
        ):
            stack.callback(handle.remove)
        stack.enter_context(SeenAsOnHost(session))
        stack.enter_context(_Deferring(session))
        yield
    for parameter in session.owners.values():
        if cell_of(parameter) is not None:
            remember(parameter, Recorded(view_of(parameter), parameter))


class _Deferring(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what is done to tensors without memory, and makes large new ones without."""

    def __init__(self, session: Session) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._session = session

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            tensors = tensors_in((args, kwargs))
            deferred = [tensor for tensor in tensors if cell_of(tensor) is not None]
            unknown = any(tensor.is_meta and cell_of(tensor) is None for tensor in tensors)
            if unknown and deferred:
                raise ModelError(
                    f"{func} mixes a tensor made under pf.deferred_init() with one on the meta device, which has no "
                    "values. Build both inside the block."
                )
            if unknown:
                return func(*args, **kwargs)
            on_host = _with_device(kwargs, _HOST) if kwargs.get("device") == _META else kwargs
            if deferred:
                return self._defer(func, args, on_host)
            return func(*args, **on_host) if tensors else _make(func, args, on_host)

    def _defer(self, func: Any, args: Any, kwargs: Any) -> Any:
        written = _written(func, args, kwargs)
        if any(cell_of(tensor) is None for tensor in written):
            return self._run_now(func, args, kwargs, written)
        try:
            result = func(*_on_meta(args), **_with_device(_on_meta(kwargs), _META))
        except (RuntimeError, NotImplementedError):  # it depends on values, or has no kernel for shapes alone
            return self._run_now(func, args, kwargs, written)
        leaves = tree_leaves(result)
        if any(not isinstance(leaf, torch.Tensor) for leaf in leaves if leaf is not None):
            return self._run_now(func, args, kwargs, written)
        new = [leaf for leaf in leaves if leaf is not None and cell_of(leaf) is None]
        if not new and not written:  # a view
            return result
        if func.overloadpacket in _UNINITIALISED:
            give_cell(result)
            return result
        self._record(func, args, kwargs, written, leaves)
        return result

    def _record(self, func: Any, args: Any, kwargs: Any, written: list[torch.Tensor], results: list[Any]) -> None:
        kept_args, kept_kwargs = _as_views((args, kwargs))
        overwrites = bool(written) and func.overloadpacket in _OVERWRITES and _is_all(written[0])
        needs = heads_in((kept_args[1:] if overwrites else kept_args, kept_kwargs))
        node = Node(func, kept_args, kept_kwargs, needs, random=_draws(func, kwargs))
        if node.random is not None:  # the generator goes on as if the operation had been run
            scratch = self._session.scratch(kept_args[0]) if overwrites else None
            rest = evaluate((kept_args[1:] if overwrites else kept_args, kept_kwargs))
            func(*(() if scratch is None else (scratch,)), *rest[0], **rest[1])
        for result in results:
            made = isinstance(result, torch.Tensor) and cell_of(result) is None
            node.made.append(give_cell(result) if made else None)
        for view in [*node.made, *(view_of(tensor) for tensor in written)]:
            if view is not None:
                view.cell.head = node
        for tensor in written:
            self._session.changed(tensor)

    def _run_now(self, func: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> Any:
        """Runs an operation on the values there would be; what it writes to tensors without memory is written down."""
        real_args, real_kwargs = evaluate(_as_views((args, kwargs), copy=False))
        result = func(*real_args, **real_kwargs)
        reals = dict(zip(map(id, tensors_in((real_args, real_kwargs))), tensors_in((args, kwargs)), strict=True))
        for real, tensor in zip(_written(func, real_args, real_kwargs), written, strict=True):
            if cell_of(tensor) is not None:
                self._record(_aten.copy_.default, (tensor, real), {}, [tensor], [tensor])
        return tree_map_only(torch.Tensor, lambda tensor: reals.get(id(tensor), tensor), result)


def _make(func: Any, args: Any, kwargs: Any) -> Any:
    """A new tensor: without memory where it is large, made of floating-point numbers, and meant for the host."""
    names = {argument.name for argument in func._schema.arguments}
    if "device" not in names or kwargs.get("device") not in (None, _HOST):
        return func(*args, **kwargs)
    empty = func(*args, **{**kwargs, "device": _META, "pin_memory": None})
    if not (isinstance(empty, torch.Tensor) and empty.is_floating_point() and empty.numel() >= _LARGE):
        return func(*args, **kwargs)
    random = _draws(func, kwargs)
    if random is not None:
        func(*args, **kwargs)
    view = give_cell(empty)
    if func.overloadpacket not in _UNINITIALISED:
        view.cell.head = Node(func, args, kwargs, (), [view], random)
    return empty


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors among the arguments that an operator writes to."""
    found: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            found.extend(tensors_in(given))
    return found


def _draws(func: Any, kwargs: Any) -> RandomState | None:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    return RandomState.of(kwargs.get("generator") or torch.default_generator)


def _is_all(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all that lies in its storage."""
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def _on_meta(tree: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor if tensor.is_meta else tensor.to(_META), tree)


def _with_device(kwargs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {**kwargs, "device": device} if "device" in kwargs else kwargs


def _as_views(tree: Any, *, copy: bool = True) -> Any:
    """A view for each tensor without memory; one with memory is copied, since it may change before it is used."""

    def as_view(tensor: torch.Tensor) -> Any:
        if cell_of(tensor) is not None:
            return view_of(tensor)
        return tensor.detach().clone() if copy else tensor

    return tree_map_only(torch.Tensor, as_view, tree)
