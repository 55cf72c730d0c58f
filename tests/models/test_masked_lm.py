from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from paraflow.errors import DataError, ModelError
from paraflow.models.masked_lm import MaskedLM, MaskedLMConfig
from paraflow.models.masking import MaskingCollator

PAD, MASK, VOCABULARY = 0, 1, 60


def model(**changes: Any) -> MaskedLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "layers": 2, "hidden": 32, "heads": 4, "context": 16}
    return MaskedLM(MaskedLMConfig(**{**sizes, **changes}))


def test_every_token_sees_every_other() -> None:
    lm = model()
    tokens = torch.randint(2, VOCABULARY, (2, 10))
    logits = lm(tokens)
    assert logits.shape == (2, 10, VOCABULARY)
    other = tokens.clone()
    other[:, 6] = (other[:, 6] + 1) % VOCABULARY
    changed = (lm(other) != logits).any(-1)
    assert changed.all()


def test_padding_changes_nothing() -> None:
    lm = model()
    tokens = torch.randint(2, VOCABULARY, (1, 7))
    padded = F.pad(tokens, (0, 5), value=PAD)
    mask = torch.arange(12)[None] < 7
    torch.testing.assert_close(lm(padded, mask)[:, :7], lm(tokens))
    assert not torch.allclose(lm(padded)[:, :7], lm(tokens), atol=1e-4)


def test_loss_is_the_mean_over_predicted_tokens() -> None:
    lm = model()
    tokens = torch.randint(2, VOCABULARY, (2, 10))
    labels = torch.full_like(tokens, -100)
    labels[0, 3], labels[1, 7], labels[1, 8] = 5, 6, 7
    log_probabilities = lm(tokens).log_softmax(-1)
    expected = -(log_probabilities[0, 3, 5] + log_probabilities[1, 7, 6] + log_probabilities[1, 8, 7]) / 3
    for batch in ((tokens, labels), {"input_ids": tokens, "labels": labels}):
        step = lm.training_step(batch)
        torch.testing.assert_close(step["loss"], expected)
        assert step["weight"] == 3
        torch.testing.assert_close(lm.predict_step(batch), lm(tokens))
    assert step["loss"].item() == pytest.approx(math.log(VOCABULARY), abs=0.3)


def test_micro_batch_with_nothing_predicted_weighs_nothing() -> None:
    lm = model()
    step = lm.training_step((torch.randint(VOCABULARY, (2, 8)), torch.full((2, 8), -100)))
    assert (step["loss"].item(), step["weight"].item()) == (0.0, 0)
    step["loss"].backward()
    assert all(not parameter.grad.any() for parameter in lm.parameters())


def test_it_learns_to_fill_in() -> None:
    lm = model()
    rows = torch.arange(2, 14).repeat(32, 1) + torch.randint(40, (32, 1))
    collate = MaskingCollator(MASK, VOCABULARY, pad_token=PAD)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=5e-3)
    losses = []
    for _ in range(250):
        step = lm.training_step(collate(list(rows)))
        optimizer.zero_grad()
        step["loss"].backward()
        optimizer.step()
        losses.append(step["loss"].item())
    assert sum(losses[-10:]) / 10 < 0.5 * losses[0]


def test_masking_has_the_papers_proportions() -> None:
    generator = torch.Generator().manual_seed(0)
    collate = MaskingCollator(MASK, VOCABULARY, special_tokens=[2], pad_token=PAD, generator=generator)
    rows = torch.randint(2, VOCABULARY, (1000, 200), generator=generator)
    batch = collate(list(rows))
    inputs, labels = batch["input_ids"], batch["labels"]
    ordinary, chosen = rows > 2, labels != -100
    assert not (chosen & ~ordinary).any()
    assert torch.equal(labels[chosen], rows[chosen])
    assert torch.equal(inputs[~chosen], rows[~chosen])
    assert chosen.sum() / ordinary.sum() == pytest.approx(0.15, abs=0.003)
    hidden, same = chosen & (inputs == MASK), chosen & (inputs == rows)
    drawn = chosen & ~hidden & ~same
    # A random token is the same one by chance, once in 57.
    assert hidden.sum() / chosen.sum() == pytest.approx(0.8, abs=0.01)
    assert drawn.sum() / chosen.sum() == pytest.approx(0.1 * 56 / 57, abs=0.01)
    assert same.sum() / chosen.sum() == pytest.approx(0.1 + 0.1 / 57, abs=0.01)
    assert set(inputs[drawn].tolist()) == set(range(3, VOCABULARY))


def test_masking_pads_and_repeats_with_a_seed() -> None:
    rows = [torch.arange(2, 2 + length) for length in (5, 9, 1)]

    def draw(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return MaskingCollator(MASK, VOCABULARY, pad_token=PAD, probability=1.0, generator=generator)(rows)

    batch = draw(3)
    assert batch["attention_mask"].sum(1).tolist() == [5, 9, 1]
    assert torch.equal(batch["labels"] != -100, batch["attention_mask"])
    assert (batch["input_ids"][~batch["attention_mask"]] == PAD).all()
    assert all(torch.equal(batch[key], draw(3)[key]) for key in batch)
    assert not torch.equal(batch["input_ids"], draw(4)["input_ids"])


def test_masking_is_a_collate_function_also_in_workers() -> None:
    dataset = TensorDataset(torch.randint(2, VOCABULARY, (24, 10)))
    loader = DataLoader(dataset, batch_size=6, collate_fn=MaskingCollator(MASK, VOCABULARY), num_workers=1)
    batches = list(loader)
    assert [batch["input_ids"].shape for batch in batches] == [(6, 10)] * 4
    assert set(batches[0]) == {"input_ids", "labels"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mask_token": 60}, r"Tokens \[60\] are not in a vocabulary of 60"),
        ({"probability": 0}, "probability=0"),
        ({"replace": 0.8, "random": 0.3}, "random=0.3"),
        ({"special_tokens": range(60)}, "nothing to predict"),
    ],
)
def test_masking_that_cannot_be_gets_a_sentence(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        MaskingCollator(**{"mask_token": MASK, "vocab_size": VOCABULARY, **arguments})


def test_bad_input_gets_a_sentence() -> None:
    collate = MaskingCollator(MASK, VOCABULARY)
    with pytest.raises(DataError, match="2 to 3 tokens and no pad_token"):
        collate([[2, 3], [2, 3, 4]])
    with pytest.raises(DataError, match=r"torch.float32 \[3\]"):
        collate([torch.zeros(3)])
    with pytest.raises(DataError, match="17 tokens and has a context of 16"):
        model()(torch.zeros(1, 17, dtype=torch.int64))
    with pytest.raises(DataError, match="was given a Tensor as a batch"):
        model().training_step(torch.zeros(1, 5, dtype=torch.int64))
    with pytest.raises(ModelError, match=r"MaskedLMConfig\(context=0\)"):
        model(context=0)
