"""Text as bytes: a tokenizer that needs no vocabulary file."""

from __future__ import annotations

import torch
from torch import Tensor

from paraflow.errors import DataError

BYTES = 256
"""The size of a vocabulary of bytes; special tokens take the numbers from here on."""


def encode(text: str) -> Tensor:
    """The UTF-8 bytes of `text`: int64 [bytes], each from 0 to 255.

    Example:
        >>> encode("Hé")
        tensor([ 72, 195, 169])
    """
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long() if text else torch.empty(0).long()


def decode(tokens: Tensor) -> str:
    """The text of bytes [tokens]; special tokens are left out, and bytes that are not UTF-8 become U+FFFD.

    Example:
        >>> decode(encode("Hé"))
        'Hé'
    """
    return bytes(token for token in tokens.tolist() if token < BYTES).decode(errors="replace")


def chunk(tokens: Tensor, length: int, overlap: int = 0) -> Tensor:
    """Cut one long sequence into rows of equal length; a rest that fills no row is left out.

    For a causal language model of context T cut rows of T + 1 with an overlap of 1: each token is then a target once.

    Args:
        tokens: Int64 [tokens].
        length: Tokens in a row.
        overlap: How many tokens a row shares with the next one.

    Returns:
        Int64 [rows, length].

    Raises:
        DataError: If there are fewer than `length` tokens, or the overlap is not smaller than the row.

    Example:
        >>> chunk(torch.arange(8), length=3, overlap=1)
        tensor([[0, 1, 2],
                [2, 3, 4],
                [4, 5, 6]])
    """
    if not 0 <= overlap < length:
        raise DataError(f"An overlap of {overlap} leaves nothing new in a row of {length}; give 0 <= overlap < length.")
    if len(tokens) < length:
        raise DataError(f"{len(tokens)} tokens do not fill one row of {length}; give more text or a smaller length.")
    return tokens.unfold(0, length, length - overlap).contiguous()
