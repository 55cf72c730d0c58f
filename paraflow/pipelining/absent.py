"""Tensors that another stage has: they have a shape and a type, and no values."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor

from paraflow.errors import ModelError
from paraflow.pipelining.values import rebuilt

Key = tuple[int, int] | str
"""Which value of a step it is: the number of the call that gave it and its place in what was returned; or the name of
a parameter or buffer."""


@dataclass(frozen=True, slots=True)
class Meta:
    """What is known of a tensor without its values.

    Attributes:
        shape: Its shape.
        dtype: Its type.
        requires_grad: Whether a gradient flows back through it.
        stride: How its elements lie in memory; empty means in order.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    stride: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Slot:
    """A value of a step: which it is, and what its tensor is like."""

    key: Key
    meta: Meta
    stride: tuple[int, ...]
    device: torch.device


class Absent(Tensor):
    """A tensor of another stage. Its shape, type and device are as if it were here; its values cannot be read.

    While a stage runs, calls with such tensors are looked up in what was traced, or run with what has been received.

    Example:
        >>> slot = Slot((0, 0), Meta((2, 3), torch.float32, True), (3, 1), torch.device("cpu"))
        >>> absent = Absent.like(slot)
        >>> absent.shape, absent.requires_grad, isinstance(absent, torch.Tensor)
        (torch.Size([2, 3]), True, True)
    """

    slot: Slot
    owner: object
    """The run that it belongs to; None for a weight, which belongs to all."""
    present: Tensor | None
    """The values, once the stage that has received them has used them."""

    @classmethod
    def like(cls, slot: Slot, owner: object = None) -> Absent:
        """Returns a tensor without values."""
        make: Any = Tensor._make_wrapper_subclass
        absent = make(
            cls,
            slot.meta.shape,
            strides=slot.stride,
            dtype=slot.meta.dtype,
            device=slot.device,
            requires_grad=slot.meta.requires_grad,
        )
        absent.slot, absent.owner, absent.present = slot, owner, None
        return cast("Absent", absent)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answers what is no value; outside of a stage's run anything else needs the values."""
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*rebuilt(tuple(args), present), **rebuilt(dict(kwargs), present))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own annotation leaves out func
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuses what comes here past Python, as scripted functions do."""
        raise unseen(str(func))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Returns its shape and type."""
        return f"Absent(shape={self.slot.meta.shape}, dtype={self.slot.meta.dtype})"


def present(tensor: Tensor) -> Tensor:
    """Returns a tensor with values for one that may be absent.

    Raises:
        ModelError: It is absent, and has not been here.
    """
    if not isinstance(tensor, Absent):
        return tensor
    if tensor.present is None:
        raise outlived(tensor)
    return tensor.present


def slot_of(tensor: Tensor, key: Key, device: torch.device | None = None) -> Slot:
    """Returns a value's slot, like a tensor."""
    meta = Meta(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tuple(tensor.stride()))
    return Slot(key, meta, tuple(tensor.stride()), device or tensor.device)


def outlived(tensor: Absent) -> ModelError:
    """The error for a tensor that was kept beyond the step in which it was made."""
    return ModelError(
        f"A tensor of shape {list(tensor.slot.meta.shape)} is used after the step that made it, on a stage of the "
        f"pipeline that does not have it{at_line()}. Return from the step what is used outside of it."
    )


def unreadable(call: str) -> ModelError:
    """The error for code that needs the values of a tensor that another stage has."""
    return ModelError(
        f"{call}() reads the values of a tensor that is not on every stage of the pipeline{at_line()}. Python code "
        "outside of the layers runs on all stages, so it may depend on shapes and on the batch, not on what layers "
        "compute. Write it with tensors (torch.where instead of if, .detach() instead of .item() for what is logged), "
        "or move it into the forward of a module that has parameters: that runs where its values are."
    )


def unseen(call: str) -> ModelError:
    """The error for a call that does not say to Python that it is made."""
    return ModelError(
        f"{call} was called with a tensor of another stage of the pipeline, in a way that cannot be seen{at_line()}: "
        "a scripted function, a custom autograd function or C++ code outside of the layers. Move the call into the "
        "forward of a module that has parameters, or write it with torch's own functions."
    )


_OURS = str(Path(__file__).parent)
_SKIPPED = (_OURS, str(Path(torch.__file__).parent), str(Path(linecache.__file__).parent / "contextlib.py"))


def at_line() -> str:
    """Returns where the innermost line of the user's code is, and its text: ``", at net.py:3: y = x.item()"``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    if frame is None:
        return ""
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    return f", at {place}: {text}" if text else f", at {place}"


_GETTERS = [
    "shape",
    "dtype",
    "device",
    "ndim",
    "layout",
    "requires_grad",
    "is_leaf",
    "is_cuda",
    "is_cpu",
    "is_xpu",
    "is_mps",
    "is_meta",
    "is_sparse",
    "is_sparse_csr",
    "is_quantized",
    "is_nested",
    "is_mkldnn",
    "itemsize",
    "nbytes",
    "grad",
    "grad_fn",
    "_version",
    "output_nr",
    "retains_grad",
]
_METHODS = [
    "size",
    "dim",
    "ndimension",
    "stride",
    "numel",
    "nelement",
    "element_size",
    "is_floating_point",
    "is_complex",
    "is_signed",
    "is_contiguous",
    "storage_offset",
    "get_device",
    "is_inference",
    "__len__",
    "__hash__",
    "_is_view",
    "__repr__",
]
_FUNCTIONS = (torch.is_floating_point, torch.is_complex, torch.is_signed, torch.numel, torch.is_inference)
METADATA = frozenset(
    [getattr(Tensor, name).__get__ for name in _GETTERS if hasattr(Tensor, name)]
    + [getattr(Tensor, name) for name in _METHODS]
    + list(_FUNCTIONS)
)
"""The functions that ask a tensor for something other than its values."""

READING = frozenset(
    [
        "item",
        "tolist",
        "numpy",
        "__array__",
        "__bool__",
        "__int__",
        "__float__",
        "__complex__",
        "__index__",
        "is_nonzero",
        "data_ptr",
        "untyped_storage",
        "storage",
        "equal",
        "allclose",
        "__contains__",
        "__reduce_ex__",
        "__format__",
        "__dlpack__",
        "backward",
        "grad",
    ]
)
"""The names of functions that need the values on the host."""
