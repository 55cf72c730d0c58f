from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from paraflow.errors import DataError, ModelError
from paraflow.models.byte_text import chunk, decode, encode
from paraflow.models.causal_lm import CausalLM, CausalLMConfig


def config(**changes: Any) -> CausalLMConfig:
    sizes: dict[str, Any] = {"vocab_size": 50, "layers": 2, "hidden": 32, "heads": 4, "context": 16}
    return CausalLMConfig(**{**sizes, **changes})


def model(**changes: Any) -> CausalLM:
    torch.manual_seed(0)
    return CausalLM(config(**changes))


VARIANTS = [{}, {"positions": "learned", "tied": False}, {"kv_heads": 2, "norm": "rms", "activation": "swiglu"}]


@pytest.mark.parametrize("changes", VARIANTS)
def test_later_tokens_change_nothing_earlier(changes: dict[str, Any]) -> None:
    lm = model(**changes)
    tokens = torch.randint(50, (2, 12))
    logits = lm(tokens)
    assert logits.shape == (2, 12, 50)
    for changed in (5, 11):
        other = tokens.clone()
        other[:, changed] = (other[:, changed] + 1) % 50
        again = lm(other)
        torch.testing.assert_close(again[:, :changed], logits[:, :changed])
        assert not torch.allclose(again[:, changed], logits[:, changed])


@pytest.mark.parametrize("changes", [{}, {"positions": "learned"}])
def test_positions_can_be_given(changes: dict[str, Any]) -> None:
    lm = model(**changes)
    tokens = torch.randint(50, (1, 8))
    torch.testing.assert_close(lm(tokens, torch.arange(8)), lm(tokens))
    assert not torch.allclose(lm(tokens, torch.arange(8) * 2), lm(tokens))


def test_untrained_loss_is_near_uniform_and_it_learns() -> None:
    lm = model()
    tokens = torch.randint(50, (8, 17))
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = lm.training_step(tokens)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(50), abs=0.1)
    assert losses[-1] < 0.5


def test_every_form_of_batch_gives_the_same_step() -> None:
    lm = model()
    tokens = torch.randint(50, (3, 13))
    expected = F.cross_entropy(lm(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    for batch in (
        tokens,
        (tokens,),
        (tokens[:, :-1], tokens[:, 1:]),
        {"input_ids": tokens},
        {"input_ids": tokens, "labels": tokens},
    ):
        step = lm.training_step(batch)
        torch.testing.assert_close(step["loss"], expected)
        assert step["weight"] == 36
        torch.testing.assert_close(lm.validation_step(batch)["loss"], expected)
        assert lm.predict_step(batch).shape[::2] == (3, 50)


def test_ignored_targets_and_their_weight() -> None:
    lm = model()
    tokens = torch.randint(50, (2, 13))
    labels = tokens.clone()
    labels[0, 4:] = -100
    step = lm.training_step({"input_ids": tokens, "labels": labels})
    assert step["weight"] == 3 + 12
    losses = F.cross_entropy(lm(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none")
    torch.testing.assert_close(step["loss"], (losses[0, :3].sum() + losses[1].sum()) / 15)


@pytest.mark.parametrize("named", [None, "cross_entropy"])
def test_micro_batch_with_no_target_weighs_nothing(named: str | None) -> None:
    lm = model().configure(loss=named)
    step = lm.training_step((torch.randint(50, (2, 8)), torch.full((2, 8), -100)))
    assert (step["loss"].item(), step["weight"].item()) == (0.0, 0)
    step["loss"].backward()
    assert all(not parameter.grad.any() for parameter in lm.parameters())


def test_configured_loss_is_used() -> None:
    lm = model()
    tokens = torch.randint(50, (2, 9))
    expected = lm.training_step(tokens)
    lm.configure(loss="cross_entropy")
    torch.testing.assert_close(lm.training_step(tokens)["loss"], expected["loss"])
    lm.configure(loss=lambda output, target: output.mean() * 0 + 7.0)
    assert lm.training_step(tokens)["loss"].item() == 7.0


def test_half_precision_loss_is_float32() -> None:
    lm = model().bfloat16()
    assert lm.training_step(torch.randint(50, (2, 9)))["loss"].dtype == torch.float32


def test_generate_greedily_takes_the_most_likely() -> None:
    lm = model(dropout=0.5)
    prompt = torch.randint(50, (2, 14))
    tokens = lm.generate(prompt, 5, temperature=0)
    assert lm.training
    assert torch.equal(tokens[:, :14], prompt)
    lm.eval()
    for position in range(14, 19):
        seen = tokens[:, max(0, position - 16) : position]
        assert torch.equal(lm(seen)[:, -1].argmax(-1), tokens[:, position])
    assert torch.equal(lm.generate(prompt[0], 5, top_k=1), tokens[0])


def test_generate_samples_the_distribution() -> None:
    lm = model(vocab_size=5)
    lm.embedding.weight.data *= 4
    draws = lm.generate(torch.tensor([[1, 3]]).expand(20_000, 2), 1, temperature=0.7, generator=torch.Generator())[:, 2]
    expected = (lm(torch.tensor([[1, 3]]))[0, -1] / 0.7).softmax(-1)
    torch.testing.assert_close(draws.bincount(minlength=5) / 20_000, expected, atol=0.02, rtol=0)
    top = lm.generate(torch.tensor([[1, 3]]).expand(500, 2), 1, temperature=2.0, top_k=2)[:, 2]
    assert set(top.tolist()) == set(expected.topk(2).indices.tolist())


def test_subclass_replaces_a_part() -> None:
    class Identity(torch.nn.Module):
        def forward(self, x: torch.Tensor, padding_mask: None, positions: None) -> torch.Tensor:
            return x

    class Unmixed(CausalLM):
        def make_attention(self) -> torch.nn.Module:
            return Identity()

    lm = Unmixed(config())
    tokens = torch.randint(50, (1, 6))
    torch.testing.assert_close(lm(tokens)[:, 3:], lm(tokens[:, 3:]))


def test_counts() -> None:
    lm = model(tied=False, bias=False)
    block = 4 * 32 * 32 + 2 * 32 * 128 + 4 * 32
    assert lm.non_embedding_parameters() == 2 * block + 64 + 50 * 32
    assert sum(parameter.numel() for parameter in lm.parameters()) == lm.non_embedding_parameters() + 50 * 32
    assert lm.flops_per_token() == 6 * lm.non_embedding_parameters() + 12 * 2 * 32 * 16
    assert model(bias=False).flops_per_token() == lm.flops_per_token()
    assert "embedding.weight" in model().state_dict()
    assert not any(name.startswith("head") for name in model().state_dict())


def test_counted_flops_are_those_that_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    lm = model(bias=False)
    with FlopCounterMode(display=False) as counter:
        lm.training_step(torch.randint(50, (3, 17)))["loss"].backward()
    # torch counts multiplications alone, and for attention's backward also the recomputed scores.
    assert lm.flops_per_token() == pytest.approx(counter.get_total_flops() / (3 * 16), rel=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 30}, "heads=4"),
        ({"kv_heads": 3}, "kv_heads=3"),
        ({"layers": 0}, r"CausalLMConfig\(layers=0\) must be positive"),
        ({"dropout": 1.0}, "probability"),
        ({"norm": "batch"}, 'write "layer" or "rms"'),
        ({"positions": "sine"}, 'write "rotary" or "learned"'),
    ],
)
def test_sizes_that_cannot_be_get_a_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config(**changes)


def test_bad_input_gets_a_sentence() -> None:
    lm = model()
    with pytest.raises(DataError, match="17 tokens and has a context of 16"):
        lm(torch.zeros(1, 17, dtype=torch.int64))
    with pytest.raises(DataError, match="was given a str as a batch"):
        lm.training_step("text")
    with pytest.raises(ModelError, match="one token at least"):
        lm.generate(torch.zeros(0, dtype=torch.int64), 3)


def test_text_as_bytes() -> None:
    text = "naïve – 日本"
    assert decode(encode(text)) == text
    assert decode(torch.tensor([72, 105, 300])) == "Hi"
    assert encode("").shape == (0,)
    tokens = encode("abcdefgh")
    rows = chunk(tokens, 4, overlap=1)
    assert torch.equal(torch.cat([rows[0, :1], rows[:, 1:].flatten()]), tokens[:7])
    with pytest.raises(DataError, match="8 tokens do not fill one row of 9"):
        chunk(tokens, 9)
    with pytest.raises(DataError, match="overlap of 4"):
        chunk(tokens, 4, overlap=4)
