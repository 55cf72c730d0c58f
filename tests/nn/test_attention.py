from __future__ import annotations

import math

import pytest
import torch

from paraflow.errors import ModelError
from paraflow.nn import Rotary, SelfAttention


def by_hand(attention: SelfAttention, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Attention with an explicit softmax, one head at a time; `seen` is bool [batch, tokens, tokens]."""
    query, key, value = attention.query(x), attention.key(x), attention.value(x)
    size = attention.head_dim
    heads, kv_heads = query.shape[-1] // size, key.shape[-1] // size
    outputs = []
    for head in range(heads):
        q = query[..., head * size : (head + 1) * size]
        shared = head // (heads // kv_heads)
        k, v = (part[..., shared * size : (shared + 1) * size] for part in (key, value))
        scores = (q @ k.transpose(1, 2) / math.sqrt(size)).masked_fill(~seen, -math.inf)
        outputs.append(scores.softmax(-1) @ v)
    return attention.out(torch.cat(outputs, dim=-1))


@pytest.mark.parametrize("kv_heads", [None, 2, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_explicit_softmax(causal: bool, kv_heads: int | None) -> None:
    attention = SelfAttention(32, heads=4, kv_heads=kv_heads, causal=causal)
    x = torch.randn(2, 7, 32)
    seen = torch.ones(2, 7, 7, dtype=torch.bool)
    torch.testing.assert_close(attention(x), by_hand(attention, x, seen.tril() if causal else seen))


@pytest.mark.parametrize("causal", [False, True])
def test_padding_is_not_seen(causal: bool) -> None:
    attention = SelfAttention(32, heads=4, causal=causal)
    x = torch.randn(2, 7, 32)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 5:] = False
    seen = mask[:, None, :].expand(2, 7, 7)
    torch.testing.assert_close(attention(x, mask), by_hand(attention, x, seen.tril() if causal else seen))
    torch.testing.assert_close(attention(x, mask.long()), attention(x, mask))


def test_token_that_sees_nothing_gets_zeros() -> None:
    attention = SelfAttention(32, heads=4, causal=True)
    mask = torch.tensor([[False, False, True, True]])
    x = torch.randn(1, 4, 32, requires_grad=True)
    mixed = attention(x, mask)
    torch.testing.assert_close(mixed[0, :2], attention.out.bias.expand(2, 32))
    mixed.sum().backward()
    assert x.grad.isfinite().all()


def test_grouped_queries_equal_repeated_heads() -> None:
    grouped = SelfAttention(32, heads=4, kv_heads=2, rotary=Rotary(8))
    full = SelfAttention(32, heads=4, rotary=Rotary(8))
    state = grouped.state_dict()
    for name in ("key.weight", "key.bias", "value.weight", "value.bias"):
        state[name] = state[name].unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    x = torch.randn(3, 6, 32)
    torch.testing.assert_close(grouped(x), full(x))


def test_rotary_makes_order_matter() -> None:
    x = torch.randn(1, 6, 32)
    swapped = x[:, [1, 0, 2, 3, 4, 5]]
    plain, turned = SelfAttention(32, heads=4), SelfAttention(32, heads=4, rotary=Rotary(8))
    torch.testing.assert_close(plain(x)[:, 3], plain(swapped)[:, 3])
    assert not torch.allclose(turned(x)[:, 3], turned(swapped)[:, 3])


def test_dropout_only_while_training() -> None:
    attention = SelfAttention(32, heads=4, dropout=0.5)
    x = torch.randn(1, 6, 32)
    assert not torch.equal(attention(x), attention(x))
    attention.eval()
    assert torch.equal(attention(x), attention(x))


@pytest.mark.parametrize(("sizes", "message"), [((30, 4, None), "hidden=30"), ((32, 4, 3), "kv_heads=3")])
def test_sizes_that_do_not_divide_are_refused(sizes: tuple[int, int, int | None], message: str) -> None:
    hidden, heads, kv_heads = sizes
    with pytest.raises(ModelError, match=message):
        SelfAttention(hidden, heads, kv_heads=kv_heads)
