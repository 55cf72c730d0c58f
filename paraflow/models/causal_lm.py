"""A causal language model to train as it is or to subclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paraflow.errors import DataError, ModelError
from paraflow.models.model import Model
from paraflow.models.recipe import recipe_of
from paraflow.models.token_loss import token_cross_entropy, token_step
from paraflow.models.transformer_sizes import check_sizes
from paraflow.nn import Embedding, FeedForward, Linear, Rotary, SelfAttention, TransformerBlock, residual_std
from paraflow.nn.block import NormName, make_norm
from paraflow.nn.tied import project


@dataclass(frozen=True, kw_only=True)
class CausalLMConfig:
    """The sizes of a `CausalLM`.

    Attributes:
        vocab_size: Number of tokens.
        layers: Number of transformer blocks.
        hidden: Features of a token.
        heads: Query heads; divides `hidden`.
        kv_heads: Key and value heads, a divisor of `heads`; as many as `heads` if None.
        context: The most tokens that the model sees at once.
        mlp_ratio: Inner features of the feed-forward layers, as a multiple of `hidden`.
        activation: "gelu" or "swiglu".
        dropout: Dropped while training: embeddings, attention weights, and the outputs that are added to the residual
            stream.
        positions: "rotary" (Su et al. 2021) or "learned" (a table of `context` rows).
        norm: "layer" or "rms".
        bias: Whether the linear layers of the blocks have biases.
        tied: Whether the token embedding is also the output projection (Press and Wolf 2017).

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
    positions: Literal["rotary", "learned"] = "rotary"
    norm: NormName = "layer"
    bias: bool = True
    tied: bool = True

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.positions not in ("rotary", "learned"):
            raise ModelError(f'positions="{self.positions}" is not known; write "rotary" or "learned".')


class CausalLM(Model):
    """A decoder-only transformer that predicts each token from those before it (Radford et al. 2019).

    Batches of tokens train it as they are: a tensor [batch, T + 1], whose first T tokens are the input and last T the
    target; a pair (inputs, targets) of tensors [batch, T], already aligned; or a mapping with `input_ids` and,
    optionally, `labels`, both [batch, T + 1] and shifted inside as transformers does. Targets of -100 are not
    predicted. The loss is a mean over the predicted tokens, and their number is its weight.

    To change a part, override the method that makes it: `make_embedding`, `make_positions`, `make_attention`,
    `make_feed_forward`, `make_block`, `make_norm`, `make_head`.

    Args:
        config: The sizes.

    Example:
        >>> model = CausalLM(CausalLMConfig(vocab_size=256, layers=2, hidden=32, heads=2, context=16))
        >>> model(torch.zeros(3, 10, dtype=torch.int64)).shape
        torch.Size([3, 10, 256])
        >>> model.training_step(torch.zeros(3, 11, dtype=torch.int64))["weight"]
        tensor(30)
    """

    def __init__(self, config: CausalLMConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = self.make_embedding()
        self.positions = self.make_positions()
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(self.make_block() for _ in range(config.layers))
        self.norm = self.make_norm()
        self.head = self.make_head()

    def make_embedding(self) -> nn.Embedding:
        """The table of token embeddings, [vocab_size, hidden]."""
        return Embedding(self.config.vocab_size, self.config.hidden)

    def make_positions(self) -> nn.Embedding | None:
        """The table of learned positions, [context, hidden]; None where the attention has rotary ones."""
        learned = self.config.positions == "learned"
        return Embedding(self.config.context, self.config.hidden) if learned else None

    def make_attention(self) -> nn.Module:
        """One block's attention."""
        config = self.config
        rotary = Rotary(config.hidden // config.heads) if config.positions == "rotary" else None
        return SelfAttention(
            config.hidden,
            config.heads,
            kv_heads=config.kv_heads,
            causal=True,
            dropout=config.dropout,
            bias=config.bias,
            rotary=rotary,
            out_std=residual_std(config.layers),
        )

    def make_feed_forward(self) -> nn.Module:
        """One block's feed-forward layers."""
        config = self.config
        inner = int(config.mlp_ratio * config.hidden)
        std = residual_std(config.layers)
        return FeedForward(config.hidden, inner, activation=config.activation, bias=config.bias, out_std=std)

    def make_block(self) -> nn.Module:
        """One transformer block."""
        parts = self.make_attention(), self.make_feed_forward()
        return TransformerBlock(self.config.hidden, *parts, norm=self.config.norm, dropout=self.config.dropout)

    def make_norm(self) -> nn.Module:
        """The normalisation before the output projection."""
        return make_norm(self.config.norm, self.config.hidden)

    def make_head(self) -> nn.Module | None:
        """The output projection; None where the token embedding is used instead."""
        return None if self.config.tied else Linear(self.config.hidden, self.config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Predict the next token at every position.

        Args:
            tokens: Int64 [batch, tokens], at most `config.context` tokens.
            positions: The position of each token, int64 [tokens]; 0, 1, 2... if None. A rank that holds a part of the
                sequence passes the positions of its part.

        Returns:
            Logits, float [batch, tokens, vocab_size].

        Raises:
            DataError: If the sequence is longer than the context.
        """
        length = tokens.shape[1]
        if length > self.config.context:
            raise DataError(
                f"CausalLM was given {length} tokens and has a context of {self.config.context}; "
                "cut the sequences or raise config.context."
            )
        hidden = self.embedding(tokens)
        if self.positions is not None:
            where = torch.arange(length, device=tokens.device) if positions is None else positions
            hidden = hidden + self.positions(where)
        hidden = self.dropout(hidden)
        for block in self.blocks:
            hidden = block(hidden, None, positions)
        hidden = self.norm(hidden)
        # The tied weight is used, not registered twice: one name in checkpoints, and no tie for a plan to break.
        return project(hidden, self.embedding) if self.head is None else self.head(hidden)

    def loss(self, output: Any, target: Any) -> Any:
        """The loss that `configure` named; if none, the mean cross-entropy over the targets that are not -100."""
        return token_cross_entropy(output, target) if recipe_of(self).loss is None else super().loss(output, target)

    def training_step(self, batch: Any) -> dict[str, Any]:
        """The loss of one micro-batch, weighted by its predicted tokens; see the class for what a batch is."""
        inputs, targets = split_tokens(batch)
        logits = self(inputs)
        return token_step(self.loss(logits, targets), logits, targets)

    def validation_step(self, batch: Any) -> dict[str, Any]:
        """The same as `training_step`."""
        return self.training_step(batch)

    def predict_step(self, batch: Any) -> Tensor:
        """The logits of a batch's inputs: of all tokens of a tensor or mapping, of the first of a pair."""
        if isinstance(batch, Mapping):
            batch = batch["input_ids"]
        return self(batch[0] if isinstance(batch, (tuple, list)) else batch)  # type: ignore[no-any-return]

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue a prompt, one token at a time; only the last `context` tokens are seen.

        Args:
            prompt: Int64 [tokens] or [batch, tokens], at least one token.
            max_new_tokens: How many tokens to add.
            temperature: Divides the logits before sampling; 0 takes the most likely token.
            top_k: Sample among this many most likely tokens only.
            generator: Where the samples come from; torch's global RNG if None.

        Returns:
            The prompt and its continuation, int64 [tokens + max_new_tokens], with the batch dimension if the prompt
            had it.

        Raises:
            ModelError: If the prompt is empty, the temperature negative, or `top_k` not positive.
        """
        _check_sampling(prompt, temperature, top_k)
        was_training = self.training
        self.eval()
        tokens = prompt[None] if prompt.ndim == 1 else prompt
        for _ in range(max_new_tokens):
            logits = self(tokens[:, -self.config.context :])[:, -1].float()
            tokens = torch.cat((tokens, _sample(logits, temperature, top_k, generator)), dim=1)
        self.train(was_training)
        return tokens[0] if prompt.ndim == 1 else tokens

    def non_embedding_parameters(self) -> int:
        """How many parameters there are besides the embedding tables (N of Kaplan et al. 2020)."""
        tables = {id(table.weight) for table in (self.embedding, self.positions) if table is not None}
        return sum(parameter.numel() for parameter in self.parameters() if id(parameter) not in tables)

    def flops_per_token(self) -> int:
        """Floating-point operations that training on one token takes, forward and backward, at full context.

        6 N + 12 · layers · hidden · context (Chowdhery et al. 2022, appendix B), where N counts the weights that are
        multiplied: not the embedding tables, but the output projection, tied or not. Attention is counted in full,
            with no
        discount for the causal half, as the field's utilisation figures do. Recomputation is not counted.
        """
        config = self.config
        head = config.vocab_size * config.hidden if self.head is None else 0
        attention = 12 * config.layers * config.hidden * config.context
        return 6 * (self.non_embedding_parameters() + head) + attention


def split_tokens(batch: Any) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a batch for a causal language model, each int64 [batch, T].

    Args:
        batch: Tokens [batch, T + 1]; or a pair of inputs and targets [batch, T]; or a mapping with `input_ids` and
            optionally `labels` [batch, T + 1], where labels[t] is the label of the token at t.

    Raises:
        DataError: If the batch is none of these.

    Example:
        >>> split_tokens(torch.tensor([[1, 2, 3]]))
        (tensor([[1, 2]]), tensor([[2, 3]]))
    """
    if isinstance(batch, Mapping) and "input_ids" in batch:
        tokens = batch["input_ids"]
        return tokens[:, :-1], batch.get("labels", tokens)[:, 1:]
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, (tuple, list)) and len(batch) == 1:
        return split_tokens(batch[0])
    if isinstance(batch, Tensor) and batch.ndim == 2 and batch.shape[1] > 1:
        return batch[:, :-1], batch[:, 1:]
    given = f"a tensor {list(batch.shape)}" if isinstance(batch, Tensor) else f"a {type(batch).__name__}"
    raise DataError(
        f"CausalLM was given {given} as a batch; give tokens [batch, T + 1], a pair (inputs, targets), "
        "or a mapping with input_ids."
    )


def _check_sampling(prompt: Tensor, temperature: float, top_k: int | None) -> None:
    if prompt.ndim not in (1, 2) or prompt.shape[-1] == 0:
        raise ModelError(
            f"generate was given a prompt {list(prompt.shape)}; give [tokens] or [batch, tokens] with one token at "
            "least."
        )
    if temperature < 0 or (top_k is not None and top_k < 1):
        raise ModelError(f"generate needs temperature >= 0 and top_k >= 1, not {temperature} and {top_k}.")


def _sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One token for each row of logits [batch, vocab]: int64 [batch, 1]."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None and top_k < logits.shape[-1]:
        kept, tokens = logits.topk(top_k, dim=-1)
        return tokens.gather(-1, torch.multinomial((kept / temperature).softmax(-1), 1, generator=generator))
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
