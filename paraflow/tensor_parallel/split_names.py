"""The names of torch's functions that split logits know what to do with."""

from __future__ import annotations

from typing import Any


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


METADATA = _names(
    """shape size dim ndim numel nelement dtype device layout itemsize element_size nbytes names get_device stride
    storage_offset is_contiguous is_cuda is_cpu is_meta is_floating_point is_complex is_sparse is_quantized is_mps
    is_xpu is_nested is_signed is_inference is_neg is_conj grad _base _cdata _backward_hooks _post_accumulate_grad_hooks
    __len__ __hash__"""
)
OF_LOCAL = _names(
    """requires_grad grad_fn is_leaf retains_grad retain_grad output_nr _version data_ptr untyped_storage is_pinned
    is_shared record_stream"""
)
FOR_EACH_SCORE = _names(
    """float half bfloat16 double to type contiguous clone detach data tanh sigmoid neg __neg__ negative positive abs
    exp relu clamp clamp_min clamp_max clip nan_to_num pow __pow__ square sqrt softplus logsigmoid gelu silu erf sin cos
    atan arctan"""
)
WITH_A_NUMBER = _names(
    """add sub mul div subtract multiply divide true_divide rsub __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__
    __truediv__ __rtruediv__ __div__ __rdiv__"""
)


def name_of(func: Any) -> str:
    """A function's name; of an attribute, which torch asks for by its getter, that of the attribute.

    Example:
        >>> import torch
        >>> name_of(torch.Tensor.add), name_of(torch.Tensor.shape.__get__)
        ('add', 'shape')
    """
    name: str = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", name) if name in ("__get__", "__set__") else name
