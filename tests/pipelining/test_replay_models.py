"""Models that people have, unmodified, stage by stage in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paraflow.models import CausalLM, CausalLMConfig, Classifier, ClassifierConfig, MaskedLM, MaskedLMConfig
from paraflow.models.step import remember_shift
from paraflow.models.task import Task
from tests.pipelining.one_process import assert_same, backward, forward

VOCABULARY = 61


def transformer(name: str) -> tuple[nn.Module, list[list[str]], list[str]]:
    """A small model, its units in four stages, and what must stay on all of them."""
    import transformers as tf

    torch.manual_seed(0)
    small = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    tied = ["lm_head.weight"]
    if name == "bert":
        model: nn.Module = tf.BertForMaskedLM(tf.BertConfig(**small, intermediate_size=32, **off))
        layers, first, last = "bert.encoder.layer", ["bert.embeddings"], ["cls"]
        tied = ["cls.predictions.decoder.weight"]
    elif name == "gpt2":
        sizes = {
            "vocab_size": VOCABULARY,
            "n_embd": 16,
            "n_layer": 4,
            "n_head": 2,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        model = tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
        layers, first, last = "transformer.h", ["transformer.wte", "transformer.wpe"], ["transformer.ln_f", "lm_head"]
    elif name == "llama":
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**small, intermediate_size=32, num_key_value_heads=1))
        layers, first, last = "model.layers", ["model.embed_tokens"], ["model.norm", "lm_head"]
        tied = []
    else:
        sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
        model = tf.T5ForConditionalGeneration(tf.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))
        encoder = [["encoder.embed_tokens", "encoder.block.0"], ["encoder.block.1", "encoder.final_layer_norm"]]
        decoder = [
            ["decoder.embed_tokens", "decoder.block.0"],
            ["decoder.block.1", "decoder.final_layer_norm", "lm_head"],
        ]
        return model, encoder + decoder, [*tied, "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    stages = [[f"{layers}.{i}"] for i in range(4)]
    return model, [[*first, *stages[0]], stages[1], stages[2], [*stages[3], *last]], tied


def padded_tokens() -> dict[str, Tensor]:
    tokens = torch.randint(1, VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, 5:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
def test_transformers_give_their_own_loss(name: str) -> None:
    model, stages, tied = transformer(name)
    assert_same(model, stages, lambda m: m(**padded_tokens()).loss, tied)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_the_default_step_of_transformers(name: str) -> None:
    model, stages, tied = transformer(name)
    expected = Task(copy.deepcopy(model)).training_step(padded_tokens())

    def step(m: nn.Module) -> Any:
        remember_shift(m, name == "llama")  # which is found out elsewhere, by the stage that has the loss
        return Task(m).training_step(padded_tokens())

    made = forward(model, stages, step, tied)
    assert made[-1].given.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(made[-1].given[key], value, rtol=1e-6, atol=1e-6)


def causal_lm(*, tied: bool, positions: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "layers": 3, "hidden": 16, "heads": 2, "context": 8}
    return CausalLM(CausalLMConfig(**sizes, tied=tied, positions=positions))  # type: ignore[arg-type]


def templates() -> dict[str, tuple[nn.Module, list[list[str]], Any, list[str]]]:
    torch.manual_seed(0)
    tokens = torch.randint(1, VOCABULARY, (3, 8))
    batch = {**padded_tokens(), "attention_mask": padded_tokens()["attention_mask"].bool()}
    masked = MaskedLM(MaskedLMConfig(vocab_size=VOCABULARY, layers=3, hidden=16, heads=2, context=8))
    middle = [["blocks.1"], ["blocks.2", "norm"]]
    return {
        "causal": (causal_lm(tied=True, positions="rotary"), [["embedding", "blocks.0"], *middle], tokens, []),
        "untied": (
            causal_lm(tied=False, positions="learned"),
            [["embedding", "positions", "blocks.0"], ["blocks.1"], ["blocks.2", "norm", "head"]],
            tokens,
            [],
        ),
        "masked": (
            masked,
            [["embedding", "positions", "blocks.0"], ["blocks.1"], ["blocks.2", "norm", "transform"]],
            batch,
            [],
        ),
        "classifier": (
            Classifier(ClassifierConfig(inputs=12, classes=5, hidden=(8, 8))),
            [["body.1"], ["body.3"], ["body.5"]],
            (torch.randn(6, 3, 4), torch.randint(0, 5, (6,))),
            [],
        ),
    }


@pytest.mark.parametrize("name", ["causal", "untied", "masked", "classifier"])
def test_templates(name: str) -> None:
    model, stages, batch, _ = templates()[name]
    kept = ["embedding.weight"] if name in ("causal", "masked") else []
    whole = copy.deepcopy(model)
    expected = Task(whole).training_step(batch)
    expected_loss = _loss(expected)
    expected_loss.backward()
    made = forward(model, stages, lambda m: Task(m).training_step(batch), kept)
    loss = _loss(made[-1].given)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=1e-6)
    gradients = backward(made, loss)
    for key, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-5, atol=1e-6, msg=key)
    for step in ("validation_step", "predict_step"):
        with torch.no_grad():
            model.eval(), whole.eval()
            given = forward(model, stages, lambda m, step=step: getattr(Task(m), step)(batch), kept)[-1].given
            wanted = getattr(Task(whole), step)(batch)
        for key in wanted if isinstance(wanted, dict) else [...]:
            if key != "target":
                got, want = (given[key], wanted[key]) if key is not ... else (given, wanted)
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    used = made[0].replay.weights_used_outside(made[0].traffic)
    assert used == {
        "causal": {"embedding.weight": {0, 2}},
        "masked": {"embedding.weight": {0, 2}, "head_bias": {2}},
    }.get(name, {})


def _loss(output: Any) -> Tensor:
    loss = output["loss"] if isinstance(output, dict) else output
    if isinstance(loss, tuple):
        return loss[0] / loss[1]  # type: ignore[no-any-return]
    assert isinstance(loss, Tensor)
    return loss
