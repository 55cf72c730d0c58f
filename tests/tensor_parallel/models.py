"""Small models that can be split, with data; and a training of them whose numbers can be compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import paraflow as pf
from paraflow.parts import whole
from tests.parity.runs import Measured, Recorder

VOCABULARY = 1_003  # large enough to be split, and no multiple of anything
ROWS, BATCH, TOKENS = 10, 4, 8  # a last batch of two


def configured(model: nn.Module, **recipe: Any) -> nn.Module:
    # Adam would magnify what rounding leaves of gradients that are nearly zero.
    return pf.configure(model, optimizer="sgd", lr=0.3, momentum=0.9, **recipe)


def causal_lm(**sizes: Any) -> nn.Module:
    torch.manual_seed(3)
    base = {"vocab_size": VOCABULARY, "layers": 2, "hidden": 32, "heads": 4, "context": 16}
    return configured(pf.models.CausalLM(pf.models.CausalLMConfig(**{**base, **sizes})))


def masked_lm(**sizes: Any) -> nn.Module:
    torch.manual_seed(3)
    base = {"vocab_size": VOCABULARY, "layers": 2, "hidden": 32, "heads": 4, "context": 16}
    return configured(pf.models.MaskedLM(pf.models.MaskedLMConfig(**{**base, **sizes})))


def classifier(classes: int, **sizes: Any) -> nn.Module:
    torch.manual_seed(3)
    sizes = {"inputs": 6, "hidden": (17,), **sizes}
    return configured(pf.models.Classifier(pf.models.ClassifierConfig(classes=classes, **sizes)), metrics=["accuracy"])


class Encoder(nn.Module):
    """Torch's own encoder."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 50, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).mean(1))


def encoder(**sizes: Any) -> nn.Module:
    torch.manual_seed(3)
    return configured(Encoder(**sizes), loss="cross_entropy", metrics=["accuracy"])


def llama(**sizes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    base = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return configured(LlamaForCausalLM(LlamaConfig(**{**base, **heads, **sizes})))


def gpt2(**sizes: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    base = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    rest = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1}
    return configured(GPT2LMHeadModel(GPT2Config(**{**base, **rest, **sizes})))


def bert(**sizes: Any) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(3)
    base = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "max_position_embeddings": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return configured(BertForMaskedLM(BertConfig(**{**base, **heads, **dropout, **sizes})))


def rows() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (ROWS, TOKENS + 1), generator=generator)


def labelled(masked: bool = False, attention_mask: bool = True) -> dict[str, torch.Tensor]:
    """What transformers models take: of a masked model half the tokens are predicted."""
    tokens = rows()[:, :TOKENS]
    labels = tokens.clone()
    if masked:
        labels[torch.rand(labels.shape, generator=torch.Generator().manual_seed(5)) > 0.5] = -100
    data = {"input_ids": tokens, "labels": labels}
    return {**data, "attention_mask": torch.ones_like(tokens)} if attention_mask else data


def classes(count: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(ROWS, *shape, generator=generator), torch.randint(0, count, (ROWS,), generator=generator)


CASES: dict[str, tuple[Callable[..., nn.Module], Callable[[], Any]]] = {
    "causal": (causal_lm, rows),
    "masked": (masked_lm, lambda: labelled(masked=True, attention_mask=False)),
    "ten classes": (lambda **s: classifier(10, **s), lambda: classes(10, 6)),
    "many classes": (lambda **s: classifier(VOCABULARY, **s), lambda: classes(VOCABULARY, 6)),
    "encoder": (encoder, lambda: classes(5, 7, 32)),
    "llama": (llama, labelled),
    "gpt2": (gpt2, labelled),
    "bert": (bert, lambda: labelled(masked=True)),
}


def train(
    name: str, sizes: dict[str, Any] | None = None, options: dict[str, Any] | None = None, **plan: Any
) -> Measured:
    """Trains a case on this process, or as one rank of many.

    Args:
        name: The case.
        sizes: Of its model.
        options: Of TensorParallel.
        plan: The plan.
    """
    make, data = CASES[name]
    model, recorder = make(**(sizes or {})), Recorder()
    plugins = [] if options is None else [pf.plugins.TensorParallel(plan.pop("tp"), **options)]
    trainer = pf.Trainer(
        **{"max_epochs": 2, "clip_norm": float("inf"), **plan},
        seed=5,
        progress=False,
        callbacks=[recorder],
        plugins=plugins,
    )
    history = trainer.fit(model, data(), data(), batch_size=BATCH)
    parameters = {key: whole(value).detach().clone() for key, value in trainer.engine.state_dict()["model"].items()}
    return Measured(recorder.losses, recorder.norms, parameters, history.history)


Job = tuple[str, dict[str, Any], dict[str, Any] | None, dict[str, Any]]


def train_all(jobs: list[Job]) -> list[Measured]:
    """Trains one case after another, so that ranks are started once."""
    results = []
    for name, sizes, options, plan in jobs:
        torch.manual_seed(0)
        results.append(train(name, sizes, options, **plan))
    return results
