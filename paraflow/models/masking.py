"""Masking tokens for masked language modelling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paraflow.errors import DataError
from paraflow.models.losses import IGNORED


class MaskingCollator:
    """Turns a list of token sequences into a batch of masked inputs and their labels (Devlin et al. 2018, section 3.1).

    Each ordinary token is chosen with `probability`. Of the chosen ones, `replace` become the mask token, `random`
    become another ordinary token drawn uniformly, and the rest stay as they are; the model predicts all of them.
    Padding and special tokens are never chosen, and never drawn.

    It is the `collate_fn` of a `torch.utils.data.DataLoader`, for `MaskedLM` as well as for transformers' models.
    Choices come from torch's global RNG, which a DataLoader seeds anew in each worker, unless a generator is given.

    Args:
        mask_token: The token that hides another one.
        vocab_size: Number of tokens, special ones included.
        special_tokens: Tokens that are neither chosen nor drawn; the mask and padding tokens are so without being
            listed.
        pad_token: Fills short sequences on the right. If None, all sequences of a batch must be of one length, and
            there is no `attention_mask`.
        probability: The share of tokens that are predicted.
        replace: The share of predicted tokens that are hidden behind the mask token.
        random: The share of predicted tokens that are replaced by a random one.
        generator: Where the choices come from; torch's global RNG if None.

    Raises:
        DataError: If a share is not one, or a token is not in the vocabulary.

    Example:
        >>> collate = MaskingCollator(mask_token=9, vocab_size=10, pad_token=0)
        >>> batch = collate([torch.tensor([1, 2, 3]), torch.tensor([4, 5])])
        >>> batch["attention_mask"]
        tensor([[ True,  True,  True],
                [ True,  True, False]])
    """

    def __init__(
        self,
        mask_token: int,
        vocab_size: int,
        special_tokens: Sequence[int] = (),
        *,
        pad_token: int | None = None,
        probability: float = 0.15,
        replace: float = 0.8,
        random: float = 0.1,
        generator: torch.Generator | None = None,
    ) -> None:
        special = {mask_token, *special_tokens, *([] if pad_token is None else [pad_token])}
        _check(special, vocab_size, probability, replace, random)
        self.mask_token = mask_token
        self.pad_token = pad_token
        self.probability = probability
        self.replace = replace
        self.random = random
        self.generator = generator
        self._special = torch.tensor(sorted(special))
        self._ordinary = torch.tensor([token for token in range(vocab_size) if token not in special])

    def __call__(self, sequences: Sequence[Tensor | Sequence[int]]) -> dict[str, Tensor]:
        """Pad and mask.

        Args:
            sequences: Token sequences, each an int64 tensor [tokens] or a list of ints; a one-element tuple, as
                `torch.utils.data.TensorDataset` gives, stands for its element.

        Returns:
            `input_ids` int64 [batch, tokens]; `labels` of the same shape, -100 where nothing is predicted; and, with a
            `pad_token`, `attention_mask` bool [batch, tokens], False on padding.

        Raises:
            DataError: If the lengths differ and there is no `pad_token`.
        """
        rows = [_as_row(sequence) for sequence in sequences]
        tokens = self._pad(rows)
        chosen = self._draw(tokens) < self.probability
        chosen &= ~torch.isin(tokens, self._special)
        fate = self._draw(tokens)
        drawn = self._ordinary[torch.randint(len(self._ordinary), tokens.shape, generator=self.generator)]
        inputs = torch.where(chosen & (fate < self.replace), self.mask_token, tokens)
        inputs = torch.where(chosen & (fate >= self.replace) & (fate < self.replace + self.random), drawn, inputs)
        batch = {"input_ids": inputs, "labels": torch.where(chosen, tokens, IGNORED)}
        if self.pad_token is not None:
            lengths = torch.tensor([len(row) for row in rows])
            batch["attention_mask"] = torch.arange(tokens.shape[1]) < lengths[:, None]
        return batch

    def _draw(self, tokens: Tensor) -> Tensor:
        return torch.rand(tokens.shape, generator=self.generator)

    def _pad(self, rows: list[Tensor]) -> Tensor:
        lengths = {len(row) for row in rows}
        if len(lengths) == 1:
            return torch.stack(rows)
        if not lengths:
            raise DataError("MaskingCollator was given no sequences; a batch needs at least one.")
        if self.pad_token is None:
            raise DataError(
                f"MaskingCollator was given sequences of {min(lengths)} to {max(lengths)} tokens and no pad_token to "
                "fill the short ones; pass pad_token=... or cut the sequences to one length."
            )
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.pad_token)


def _as_row(sequence: Tensor | Sequence[Any]) -> Tensor:
    if isinstance(sequence, tuple) and len(sequence) == 1 and isinstance(sequence[0], Tensor):
        sequence = sequence[0]
    row = torch.as_tensor(sequence)
    if row.ndim != 1 or row.is_floating_point():
        raise DataError(
            f"MaskingCollator takes sequences of tokens, int64 [tokens]; it was given {row.dtype} {list(row.shape)}."
        )
    return row.long()


def _check(special: set[int], vocab_size: int, probability: float, replace: float, random: float) -> None:
    outside = sorted(token for token in special if not 0 <= token < vocab_size)
    if outside:
        raise DataError(
            f"Tokens {outside} are not in a vocabulary of {vocab_size}; vocab_size counts the special tokens too."
        )
    if len(special) == vocab_size:
        raise DataError(f"All {vocab_size} tokens of the vocabulary are special; there is nothing to predict.")
    if not 0 < probability <= 1 or replace < 0 or random < 0 or replace + random > 1:
        raise DataError(
            f"probability={probability}, replace={replace}, random={random} are not shares; "
            "give 0 < probability <= 1 and replace + random <= 1."
        )
