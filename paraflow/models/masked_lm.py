"""A masked language model to train as it is or to subclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paraflow.errors import DataError
from paraflow.models.model import Model
from paraflow.models.recipe import recipe_of
from paraflow.models.token_loss import token_cross_entropy, token_step
from paraflow.models.transformer_sizes import check_sizes
from paraflow.nn import Embedding, FeedForward, Linear, SelfAttention, TransformerBlock, residual_std
from paraflow.nn.block import NormName, make_norm
from paraflow.nn.tied import project


@dataclass(frozen=True, kw_only=True)
class MaskedLMConfig:
    """The sizes of a `MaskedLM`.

    Attributes:
        vocab_size: Number of tokens, the mask and padding tokens included.
        layers: Number of transformer blocks.
        hidden: Features of a token.
        heads: Query heads; divides `hidden`.
        kv_heads: Key and value heads, a divisor of `heads`; as many as `heads` if None.
        context: The most tokens that the model sees at once.
        mlp_ratio: Inner features of the feed-forward layers, as a multiple of `hidden`.
        activation: "gelu" or "swiglu".
        dropout: Dropped while training: embeddings, attention weights, and the outputs that are added to the residual
            stream.
        norm: "layer" or "rms".

    Raises:
        ModelError: If a size cannot be.
    """

    vocab_size: int
    layers: int
    hidden: int
    heads: int
    context: int
    kv_heads: int | None = None
    mlp_ratio: float = 4
    activation: Literal["gelu", "swiglu"] = "gelu"
    dropout: float = 0.0
    norm: NormName = "layer"

    def __post_init__(self) -> None:
        check_sizes(self)


class MaskedLM(Model):
    """A bidirectional transformer encoder that predicts hidden tokens (BERT, Devlin et al. 2018).

    It differs from the paper in normalising before each half of a block (see `TransformerBlock`) and in having neither
    segments nor next-sentence prediction (Liu et al. 2019 show that they are not needed). The output projection is the
    token embedding, with a bias.

    Batches come from a `MaskingCollator`: a mapping with `input_ids`, `labels` (-100 where nothing is predicted) and,
    optionally, `attention_mask` (true on tokens, false on padding), each [batch, tokens]; or a pair (inputs, labels).
    The loss is a mean over the predicted tokens, and their number is its weight.

    To change a part, override the method that makes it: `make_embedding`, `make_positions`, `make_attention`,
    `make_feed_forward`, `make_block`, `make_norm`, `make_transform`.

    Args:
        config: The sizes.

    Example:
        >>> model = MaskedLM(MaskedLMConfig(vocab_size=258, layers=2, hidden=32, heads=2, context=16))
        >>> model(torch.zeros(3, 10, dtype=torch.int64)).shape
        torch.Size([3, 10, 258])
    """

    def __init__(self, config: MaskedLMConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = self.make_embedding()
        self.positions = self.make_positions()
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(self.make_block() for _ in range(config.layers))
        self.norm = self.make_norm()
        self.transform = self.make_transform()
        self.head_bias = nn.Parameter(torch.zeros(config.vocab_size))

    def make_embedding(self) -> nn.Embedding:
        """The table of token embeddings, [vocab_size, hidden]."""
        return Embedding(self.config.vocab_size, self.config.hidden)

    def make_positions(self) -> nn.Embedding:
        """The table of learned positions, [context, hidden]."""
        return Embedding(self.config.context, self.config.hidden)

    def make_attention(self) -> nn.Module:
        """One block's attention."""
        config = self.config
        return SelfAttention(
            config.hidden,
            config.heads,
            kv_heads=config.kv_heads,
            dropout=config.dropout,
            out_std=residual_std(config.layers),
        )

    def make_feed_forward(self) -> nn.Module:
        """One block's feed-forward layers."""
        config = self.config
        inner = int(config.mlp_ratio * config.hidden)
        return FeedForward(config.hidden, inner, activation=config.activation, out_std=residual_std(config.layers))

    def make_block(self) -> nn.Module:
        """One transformer block."""
        parts = self.make_attention(), self.make_feed_forward()
        return TransformerBlock(self.config.hidden, *parts, norm=self.config.norm, dropout=self.config.dropout)

    def make_norm(self) -> nn.Module:
        """The normalisation after the last block."""
        return make_norm(self.config.norm, self.config.hidden)

    def make_transform(self) -> nn.Module:
        """What is done to the hidden states before the output projection."""
        hidden = self.config.hidden
        return nn.Sequential(Linear(hidden, hidden), nn.GELU(), make_norm(self.config.norm, hidden))

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Predict the token at every position.

        Args:
            tokens: Int64 [batch, tokens], at most `config.context` tokens.
            attention_mask: Bool or int [batch, tokens], true on tokens and false on padding; all are tokens if None.

        Returns:
            Logits, float [batch, tokens, vocab_size].

        Raises:
            DataError: If the sequence is longer than the context.
        """
        length = tokens.shape[1]
        if length > self.config.context:
            raise DataError(
                f"MaskedLM was given {length} tokens and has a context of {self.config.context}; "
                "cut the sequences or raise config.context."
            )
        hidden = self.embedding(tokens) + self.positions(torch.arange(length, device=tokens.device))
        hidden = self.dropout(hidden)
        for block in self.blocks:
            hidden = block(hidden, attention_mask)
        return project(self.transform(self.norm(hidden)), self.embedding, self.head_bias)

    def loss(self, output: Any, target: Any) -> Any:
        """The loss that `configure` named; if none, the mean cross-entropy over the targets that are not -100."""
        return token_cross_entropy(output, target) if recipe_of(self).loss is None else super().loss(output, target)

    def training_step(self, batch: Any) -> dict[str, Any]:
        """The loss of one micro-batch, weighted by its predicted tokens; see the class for what a batch is."""
        inputs, labels, attention_mask = _split_batch(batch)
        logits = self(inputs, attention_mask)
        return token_step(self.loss(logits, labels), logits, labels)

    def validation_step(self, batch: Any) -> dict[str, Any]:
        """The same as `training_step`."""
        return self.training_step(batch)

    def predict_step(self, batch: Any) -> Tensor:
        """The logits of a batch's inputs; a lone tensor of tokens, or a mapping without labels, will do."""
        if isinstance(batch, Mapping):
            return self(batch["input_ids"], batch.get("attention_mask"))  # type: ignore[no-any-return]
        return self(batch[0] if isinstance(batch, (tuple, list)) else batch)  # type: ignore[no-any-return]


def _split_batch(batch: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    if isinstance(batch, Mapping) and "input_ids" in batch and "labels" in batch:
        return batch["input_ids"], batch["labels"], batch.get("attention_mask")
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1], None
    raise DataError(
        f"MaskedLM was given a {type(batch).__name__} as a batch; give a mapping with input_ids and labels, as "
        "MaskingCollator makes it, or a pair (inputs, labels)."
    )
