"""Unmodified transformers models train to what one big batch gives: their own loss, their unmasked labels counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paraflow as pf
from paraflow.data.order import shuffled

VOCABULARY, LENGTH, COUNT, BATCH = 50, 12, 10, 4


def build(name: str) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    small = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    if name == "bert":
        config = transformers.BertConfig(
            **small, intermediate_size=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
        return transformers.BertForMaskedLM(config)
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
        )
        return transformers.GPT2LMHeadModel(config)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, intermediate_size=32))


def rows() -> dict[str, torch.Tensor]:
    """Rows with 12, 11, ... unmasked labels, one of them with none."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (COUNT, LENGTH), generator=generator)
    labels = tokens.clone()
    for row in range(COUNT):
        labels[row, LENGTH - row :] = -100
    labels[4] = -100
    return {"input_ids": tokens, "labels": labels}


def trained(name: str, accumulate: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = pf.configure(build(name), optimizer="sgd", lr=0.5)
    losses: list[float] = []

    class Losses(pf.Callback):
        def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
            losses.append(logs["loss"])

    trainer = pf.Trainer(max_epochs=1, accumulate=accumulate, seed=5, progress=False, callbacks=[Losses()])
    trainer.fit(model, rows(), batch_size=BATCH)
    return losses, {key: value.detach() for key, value in model.state_dict().items()}


def by_hand(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, data, losses = build(name).train(), rows(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    order = shuffled(COUNT, 5, 0)
    for start in range(0, COUNT, BATCH):
        index = order[start : start + BATCH]
        optimizer.zero_grad()
        loss = model(input_ids=data["input_ids"][index], labels=data["labels"][index]).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {key: value.detach() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_it_trains_to_what_one_big_batch_gives(ranks: Any, name: str) -> None:
    losses, weights = by_hand(name)
    results = [trained(name, 1), trained(name, 2), *ranks(2, trained, name, 2)]
    for mine, state in results:
        assert mine == pytest.approx(losses, rel=1e-5)
        for key, value in weights.items():
            torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-6)


def test_whether_labels_are_shifted_is_seen_from_the_loss_and_not_from_the_name() -> None:
    """BartForCausalLM takes labels as they are, whatever its name says; a compiled model has another name."""
    import transformers

    from paraflow.models.step import supervised_step

    small = {"vocab_size": VOCABULARY, "d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2}
    config = transformers.BartConfig(**small, decoder_ffn_dim=16, max_position_embeddings=32, is_encoder_decoder=False)
    batch = rows()
    bart = transformers.BartForCausalLM(config)
    assert int(supervised_step(bart, None, batch)["weight"]) == int((batch["labels"] != -100).sum())
    shifted = int((batch["labels"][:, 1:] != -100).sum())
    compiled = torch.compile(build("gpt2"), backend="eager")
    for model in (build("gpt2"), compiled):
        assert int(supervised_step(model, None, batch)["weight"]) == shifted
