"""What Python code sees of tensors that have no memory under `pf.deferred_init`: tensors on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from paraflow.recording import Node, View, cell_of, evaluate, give_cell, view_of

_HOST = torch.device("cpu")
_SEEN = {
    torch.Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__: _HOST,
}
_FROM_PYTHON = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}
_INDEXED = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class Session:
    """What one block shares.

    Attributes:
        owners: The parameters that were made or changed in it, by id.
    """

    def __init__(self) -> None:
        self.owners: dict[int, nn.Parameter] = {}
        self._scratch = torch.UntypedStorage(0)  # type: ignore[no-untyped-call]

    def changed(self, tensor: torch.Tensor) -> None:
        """Notes the parameter that a tensor is, or is a view of."""
        for owner in (tensor, tensor._base):
            if isinstance(owner, nn.Parameter):
                self.owners[id(owner)] = owner

    def scratch(self, view: View) -> torch.Tensor:
        """Returns a tensor like another one, to be written to and forgotten.

        All lie in the same memory: a new one each time would leave holes in the heap that the next does not fit in.
        """
        if self._scratch.nbytes() < view.cell.nbytes:
            self._scratch = torch.UntypedStorage(view.cell.nbytes)  # type: ignore[no-untyped-call]
        return view.tensor({view.cell: self._scratch})


class SeenAsOnHost(TorchFunctionMode):
    """Tensors without memory say that they are on the host: initialisers leave those on the meta device alone.

    It also sees what torch does not dispatch: tensors from Python numbers, and `tensor.data = value`.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SEEN and cell_of(args[0]) is not None:
            return _SEEN[func]
        if func in _FROM_PYTHON and _would_be_on_meta(args, kwargs.get("device")):
            kwargs = {**kwargs, "device": _HOST}
        if func == _SET_DATA:
            self._session.changed(args[0])
            with _disable_current_modes():
                args = (args[0], _matching(*args))
        if func in _INDEXED and cell_of(args[0]) is not None:
            args = (args[0], _with_real_indices(args[1]), *args[2:])
        return func(*args, **kwargs)


def _with_real_indices(index: Any) -> Any:
    """Lists in an index would become tensors where the indexed tensor is."""
    if isinstance(index, tuple):
        return tuple(_with_real_indices(one) for one in index)
    return torch.tensor(index) if isinstance(index, (list, range)) else index


def _would_be_on_meta(args: Any, device: Any) -> bool:
    if device is not None:
        return torch.device(device).type == "meta"
    like = args[0] if args and isinstance(args[0], torch.Tensor) else None
    return torch.get_default_device().type == "meta" if like is None else cell_of(like) is not None


def _matching(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A value with or without memory, as its target is: torch does not let one take the place of the other."""
    if cell_of(target) is not None and not value.is_meta:
        empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        view = give_cell(empty)
        view.cell.head = Node(torch.ops.aten.clone.default, (value.detach().clone(),), {}, (), [view])
        return empty
    if not target.is_meta and cell_of(value) is not None:
        now: torch.Tensor = evaluate(view_of(value))
        return now
    return value
