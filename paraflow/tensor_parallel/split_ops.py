"""What torch's functions do with split logits: which of them keep the split, and which join."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional
from torch.utils._pytree import tree_map

from paraflow.errors import ModelError
from paraflow.tensor_parallel import split_ranking, split_softmax
from paraflow.tensor_parallel.split_logits import OwnRows, SplitLogits
from paraflow.tensor_parallel.split_losses import cross_entropy
from paraflow.tensor_parallel.split_names import FOR_EACH_SCORE, METADATA, OF_LOCAL, WITH_A_NUMBER, name_of
from paraflow.tensor_parallel.split_turned import TurnedLogits

Handler = Callable[..., Any]

_ALONG_A_DIMENSION = {"select": 1, "narrow": 1, "index_select": 1, "split": 2, "chunk": 2, "unbind": 1, "squeeze": 1}


def answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Does what a function of torch does, on the parts where it can, else on joined logits."""
    name = name_of(func)
    if func in _HANDLERS_OF_FUNCTIONS:
        return _HANDLERS_OF_FUNCTIONS[func](*args, **kwargs)
    if name in METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    first = args[0] if args else None
    if isinstance(first, SplitLogits):
        if getattr(func, "__name__", "") == "__set__":
            _refuse(f"Setting {name}")
        if name in OF_LOCAL:
            return func(first.local, *args[1:], **kwargs)
        _refuse_in_place(name, kwargs)
        handler = _HANDLERS.get(name)
        kept = NotImplemented if handler is None else handler(func, *args, **kwargs)
        if kept is not NotImplemented:
            return kept
    elif name in WITH_A_NUMBER and len(args) == 2:
        kept = _with_a_number(func, *args, **kwargs)
        if kept is not NotImplemented:
            return kept
    return func(*tree_map(_joined, args), **tree_map(_joined, kwargs))


def _joined(value: Any) -> Any:
    return value.whole() if isinstance(value, SplitLogits) else value


def _refuse_in_place(name: str, kwargs: dict[str, Any]) -> None:
    if name.startswith("__"):
        in_place = name == "__setitem__" or (
            name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
        )
    else:
        in_place = name.endswith("_")
    if in_place or "out" in kwargs:
        _refuse(name)


def _refuse(name: str) -> None:
    raise ModelError(
        f"{name} would change split logits in place, of which each rank holds some classes only. Make new ones (logits "
        "= logits * 2), or join them first: logits = logits.whole()."
    )


def _for_each_score(func: Any, logits: SplitLogits, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values())) or kwargs.get("inplace"):
        return NotImplemented
    result = func(logits.local, *args, **kwargs)
    return logits.with_local(result) if isinstance(result, torch.Tensor) else result


def _with_a_number(func: Any, first: Any, second: Any, **kwargs: Any) -> Any:
    logits: SplitLogits = first if isinstance(first, SplitLogits) else second
    parts = [_part_of(value, logits) for value in (first, second)]
    if any(part is None for part in parts) or not isinstance(logits, SplitLogits):
        return NotImplemented
    local = func(*parts, **kwargs)
    return logits.with_local(local) if local.shape == logits.local.shape else NotImplemented


def _part_of(value: Any, logits: SplitLogits) -> Any:
    """What of a value meets this rank's classes; None where that cannot be said, or would differ between ranks."""
    if isinstance(value, SplitLogits):
        same = value.region is logits.region and value.classes == logits.classes and value.shape == logits.shape
        return value.local if same and value.own is logits.own else None
    if isinstance(value, numbers.Number):
        return value
    if not isinstance(value, torch.Tensor) or value.dim() > logits.dim():
        return None
    if logits.own is not None and not isinstance(value, torch.nn.Parameter):
        return None  # it may be made of this rank's rows, and here are those of all
    if logits.own is not None and value.numel() not in (1, logits.classes):
        return None
    region = logits.region
    if value.dim() == 0 or value.shape[-1] == 1:
        if logits.own is not None:
            value = value.reshape(())
        return region.copy(value)
    if value.shape[-1] != logits.classes:
        return None
    return region.split_last(value if logits.own is None else value.reshape(-1))


def _reindexed(logits: SplitLogits, local: Any, index: Any, *, untouched: bool = False) -> SplitLogits:
    own = logits.own
    if own is None:
        return SplitLogits(local(logits.local), logits.region, logits.classes)
    rows = OwnRows(own.counts, index(own.index), own.untouched and untouched, own.hooks)
    return SplitLogits(logits.local, logits.region, logits.classes, rows)


def _view(func: Any, logits: SplitLogits, *shape: Any, **kwargs: Any) -> Any:
    if kwargs or not shape:
        return NotImplemented
    if isinstance(shape[0], (torch.dtype, torch.Tensor)):
        return NotImplemented
    sizes = list(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else list(shape)
    return _reshaped(logits, sizes)


def _reshaped(logits: SplitLogits, sizes: list[int]) -> Any:
    if not sizes:
        return NotImplemented
    if -1 in sizes:
        known = -torch.Size(sizes).numel()
        sizes[sizes.index(-1)] = logits.numel() // known if known > 0 else 0
    if sizes[-1] != logits.classes or torch.Size(sizes).numel() != logits.numel():
        return NotImplemented
    lead, width = sizes[:-1], logits.local.shape[-1]
    return _reindexed(
        logits, lambda local: local.reshape(*lead, width), lambda index: index.reshape(lead), untouched=True
    )


def _flatten(func: Any, logits: SplitLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    start, end = start_dim % max(1, logits.dim()), end_dim % max(1, logits.dim())
    if end == logits.dim() - 1 and start != end:
        return NotImplemented
    shape = list(logits.shape)
    return _reshaped(logits, [*shape[:start], torch.Size(shape[start : end + 1]).numel(), *shape[end + 1 :]])


def _view_as(func: Any, logits: SplitLogits, other: torch.Tensor) -> Any:
    return _reshaped(logits, list(other.shape))


def _unsqueeze(func: Any, logits: SplitLogits, dim: int) -> Any:
    place = dim % (logits.dim() + 1)
    if place == logits.dim():
        return NotImplemented
    return _reshaped(logits, [*logits.shape[:place], 1, *logits.shape[place:]])


def _along_a_dimension(func: Any, logits: SplitLogits, *args: Any, **kwargs: Any) -> Any:
    """A function that cuts along a dimension in front of the classes."""
    position = _ALONG_A_DIMENSION[name_of(func)] - 1
    given = list(args)
    if len(given) > position:
        dim = given.pop(position)
    else:
        dim = kwargs.pop("dim", None if name_of(func) == "squeeze" else 0)
    if not isinstance(dim, int) or dim % logits.dim() == logits.dim() - 1:
        return NotImplemented
    place = dim % logits.dim()
    given.insert(position, place) if len(given) >= position else kwargs.update(dim=place)
    if logits.own is None:
        return tree_map(lambda local: _reindexed(logits, lambda _: local, None), func(logits.local, *given, **kwargs))
    cut = func(logits.own.index, *given, **kwargs)
    return tree_map(lambda index: _reindexed(logits, None, lambda _: index), cut)


def _getitem(func: Any, logits: SplitLogits, key: Any) -> Any:
    keys = _keys_before_classes(key if isinstance(key, tuple) else (key,), logits.dim())
    if keys is None:
        return NotImplemented
    return _reindexed(logits, lambda local: local[(*keys, ..., slice(None))], lambda index: index[keys])


def _keys_before_classes(keys: tuple[Any, ...], dims: int) -> tuple[Any, ...] | None:
    """The keys of an index without that of the classes, where it takes all of them, else None."""
    if any(not (key is None or key is ... or isinstance(key, (int, slice, torch.Tensor, list))) for key in keys):
        return None
    if any(isinstance(key, bool) for key in keys) or sum(key is ... for key in keys) > 1:
        return None
    keys = tuple(torch.as_tensor(key) if isinstance(key, list) else key for key in keys)
    taken = sum(_dims_taken(key) for key in keys)
    place = next((n for n, key in enumerate(keys) if key is ...), None)
    if place is None and taken < dims:
        return keys
    if taken > dims or (place is not None and place == len(keys) - 1 and taken == dims):
        return None
    if place is not None and sum(_dims_taken(key) for key in keys[place + 1 :]) == 0:
        return keys if keys[-1] is not None else None
    last = keys[-1]
    return keys[:-1] if isinstance(last, slice) and last == slice(None) else None


def _dims_taken(key: Any) -> int:
    if key is None or key is ...:
        return 0
    return key.dim() if isinstance(key, torch.Tensor) and key.dtype in (torch.bool, torch.uint8) else 1


def _turned(func: Any, logits: SplitLogits, *dims: Any, **kwargs: Any) -> Any:
    """Classes in dimension 1 of three; any other order of dimensions is made of joined logits."""
    if logits.dim() != 3 or kwargs:
        return NotImplemented
    name = name_of(func)
    if name == "permute":
        order = tuple(dims[0]) if len(dims) == 1 else dims
        fits = [dim % 3 for dim in order] == [0, 2, 1]
    else:
        fits = name == "mT" or (all(isinstance(dim, int) for dim in dims) and {dim % 3 for dim in dims} == {1, 2})
    return TurnedLogits(logits) if fits else NotImplemented


def _register_hook(func: Any, logits: SplitLogits, hook: Any) -> Any:
    """A hook sees the gradient of this rank's part; where rows are pooled, that of this rank's rows."""
    own = logits.own
    if own is None:
        return logits.local.register_hook(hook)  # type: ignore[no-untyped-call]
    own.hooks.append(hook)
    return SimpleNamespace(remove=lambda: own.hooks.remove(hook))


def _formatted(func: Any, logits: SplitLogits, *args: Any, **kwargs: Any) -> Any:
    return repr(logits)


def _on_last(ranking: Handler) -> Handler:
    def handle(func: Any, logits: SplitLogits, *args: Any, **kwargs: Any) -> Any:
        return ranking(logits, *args, **kwargs)

    return handle


_HANDLERS_OF_FUNCTIONS: dict[Any, Handler] = {
    functional.cross_entropy: cross_entropy,
    functional.nll_loss: split_softmax.nll_loss,
}
_HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(FOR_EACH_SCORE, _for_each_score),
    **dict.fromkeys(WITH_A_NUMBER, _with_a_number),
    **dict.fromkeys(_ALONG_A_DIMENSION, _along_a_dimension),
    **dict.fromkeys(("view", "reshape"), _view),
    **dict.fromkeys(("view_as", "reshape_as"), _view_as),
    "flatten": _flatten,
    "unsqueeze": _unsqueeze,
    "__getitem__": _getitem,
    "register_hook": _register_hook,
    "__format__": _formatted,
    "argmax": _on_last(split_ranking.argmax),
    "max": _on_last(split_ranking.maximum),
    "topk": _on_last(split_ranking.topk),
    "logsumexp": _on_last(split_softmax.logsumexp),
    "log_softmax": _on_last(split_softmax.log_softmax),
    "softmax": _on_last(split_softmax.softmax),
    "sum": _on_last(split_softmax.total),
    "mean": _on_last(split_softmax.mean),
    **dict.fromkeys(("transpose", "swapaxes", "permute", "movedim", "moveaxis", "mT"), _turned),
}
