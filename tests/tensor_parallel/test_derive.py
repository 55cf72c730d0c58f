"""What is split of which model, and how: nothing here needs ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paraflow as pf
from paraflow.tensor_parallel.derive import find_attentions, find_embeddings
from paraflow.tensor_parallel.layout import layout_of
from tests.tensor_parallel.models import bert, causal_lm, classifier, gpt2, llama, masked_lm


def kinds(model: nn.Module) -> dict[str, str]:
    return dict(layout_of(model).kinds)


def test_our_language_model_is_split_everywhere() -> None:
    layout = layout_of(causal_lm(kv_heads=2, activation="swiglu", tied=False))
    first = layout.attentions[0]
    assert (first.name, first.heads, first.kv_heads, first.head_dim) == ("blocks.0.attention", 4, 2, 8)
    assert layout.kinds == {
        **{f"blocks.{n}.feed_forward.{name}": "colwise" for n in (0, 1) for name in ("gate", "up")},
        **{f"blocks.{n}.feed_forward.down": "rowwise" for n in (0, 1)},
        "embedding": "vocabulary",
        "head": "logits",
    }


@pytest.mark.parametrize("make", [causal_lm, masked_lm])
def test_an_embedding_that_is_the_output_layer_too_is_split(make: object) -> None:
    assert kinds(make())["embedding"] == "vocabulary"  # type: ignore[operator]


def test_a_small_vocabulary_stays_whole() -> None:
    assert "embedding" not in kinds(causal_lm(vocab_size=258))


def test_a_classifier_is_split_by_features_or_by_classes() -> None:
    assert kinds(classifier(10)) == {"body.1": "colwise", "body.3": "rowwise"}
    assert kinds(classifier(1_000)) == {"body.3": "logits"}


def test_transformers_models_are_found_with_their_ties() -> None:
    layout = layout_of(bert())
    assert layout.kinds["bert.embeddings.word_embeddings"] == "vocabulary"
    assert layout.kinds["cls.predictions.decoder"] == "logits"
    assert layout.attentions[0].out == "bert.encoder.layer.0.attention.output.dense"
    assert "bert.pooler.dense" not in layout.names
    fused = layout_of(gpt2()).attentions[0]
    assert fused.fused
    assert fused.layers == ("transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_proj")


def test_a_models_own_plan_is_used() -> None:
    layout = layout_of(llama(vocab_size=64))  # too small to be split unasked, and llama asks
    assert layout.kinds["model.embed_tokens"] == "vocabulary"
    assert layout.kinds["lm_head"] == "logits"
    assert layout.attentions[0].kv_heads == 2


def test_a_plan_with_unknown_words_is_left_aside() -> None:
    model = causal_lm(vocab_size=64)
    model._tp_plan = {"blocks.*.attention.query": "moe_tp_experts", "embedding": "embedding_rowwise"}
    assert "embedding" not in kinds(model)


def test_the_users_plan_wins_and_takes_a_whole_group() -> None:
    layout = layout_of(causal_lm(), {"blocks.0.feed_forward.up": "replicate", "blocks.1.attention.*": "replicate"})
    assert "blocks.0.feed_forward.down" not in layout.names
    assert [attention.name for attention in layout.attentions] == ["blocks.0.attention"]


def test_a_name_beats_a_pattern() -> None:
    layout = layout_of(causal_lm(), {"blocks.*.attention.*": "replicate", "blocks.0.attention.out": "rowwise"})
    assert layout.kinds["blocks.0.attention.out"] == "rowwise"
    assert layout.kinds["blocks.1.attention.out"] == "replicate"


def test_only_inside_modules() -> None:
    names = layout_of(causal_lm(), modules=["blocks.1"]).names
    assert names
    assert all(name.startswith("blocks.1.") for name in names)


@pytest.mark.parametrize(
    ("plan", "modules", "said"),
    [
        ({"blocks.0.mlp": "colwise"}, None, "no such module. The layers that can be split are: embedding, blocks.0"),
        ({"head": "columns"}, None, "nothing that can become of a layer. Write one of: colwise"),
        ({"norm": "rowwise"}, None, "which is a LayerNorm"),
        ({"embedding": "colwise"}, None, "which is a Embedding"),
        ({}, ["layers"], "It has: embedding, dropout, blocks"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(
    plan: dict[str, str], modules: list[str] | None, said: str
) -> None:
    with pytest.raises(pf.PlanError, match=said):
        layout_of(causal_lm(tied=False), plan, modules)


def test_one_weight_is_split_in_one_way() -> None:
    model = llama(tie_word_embeddings=True)
    with pytest.raises(pf.PlanError, match="share one weight"):
        layout_of(model, {"model.embed_tokens": "replicate"})


class Attention(nn.Module):
    """An attention that counts its heads in some way."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8) for _ in range(4))
        self.head_dim = 4


class FromConfig(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q_proj(x).view(*x.shape[:-1], self.config.num_attention_heads, 4)


class WithBias(Attention):
    def forward(self, x: torch.Tensor, position_bias: torch.Tensor) -> torch.Tensor:
        return self.q_proj(x) + position_bias


class WithParameter(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


class WithNorm(Attention):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.q_norm = nn.LayerNorm(size)


class OfItsOwn(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def test_attention_is_left_whole_where_it_is_not_known_to_be_right() -> None:
    assert find_attentions(Attention())
    assert find_attentions(WithNorm())[0].norms == ("q_norm",)
    assert not any(find_attentions(make()) for make in (FromConfig, WithBias, WithParameter, lambda: WithNorm(8)))
    changed = Attention()
    changed.q_proj = OfItsOwn(8, 8)
    assert not find_attentions(changed)


def test_between_a_pair_in_a_sequence_features_are_treated_one_by_one() -> None:
    assert kinds(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 4)))
    assert not kinds(nn.Sequential(nn.Linear(4, 8), nn.Softmax(-1), nn.Linear(8, 4)))
    assert not kinds(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)))


class ReadsItsTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1_000, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x) @ self.table.weight.t()


def test_a_table_that_is_read_in_another_way_stays_whole() -> None:
    assert find_embeddings(nn.Sequential(nn.Embedding(1_000, 4))) == ["0"]
    assert find_embeddings(ReadsItsTable()) == []
    assert find_embeddings(nn.Sequential(nn.Embedding(1_000, 4, max_norm=1.0))) == []


def test_what_other_ranks_hold_is_passed_over() -> None:
    model = causal_lm()
    for name in ("blocks.0", "embedding"):
        for layer in model.get_submodule(name).modules():
            layer._parameters.update(dict.fromkeys(layer._parameters))
    assert all(name.startswith("blocks.1.") for name in layout_of(model).names)
