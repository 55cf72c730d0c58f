from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from paraflow.nn import Embedding, FeedForward, Linear, SelfAttention, TransformerBlock, residual_std


def test_feed_forward_equals_its_formula() -> None:
    x = torch.randn(2, 5, 16)
    gelu = FeedForward(16, 48)
    torch.testing.assert_close(gelu(x), gelu.down(F.gelu(gelu.up(x))))
    gated = FeedForward(16, 48, activation="swiglu", bias=False)
    gate, up, down = gated.gate.weight, gated.up.weight, gated.down.weight
    torch.testing.assert_close(gated(x), (F.silu(x @ gate.T) * (x @ up.T)) @ down.T)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_block_adds_both_halves_to_the_residual_stream(norm: str) -> None:
    block = TransformerBlock(16, SelfAttention(16, heads=2), FeedForward(16, 64), norm=norm)
    x = torch.randn(2, 5, 16)
    middle = x + block.attention(block.attention_norm(x))
    torch.testing.assert_close(block(x), middle + block.feed_forward(block.feed_forward_norm(middle)))
    block.attention.out.weight.data.zero_()
    block.feed_forward.down.weight.data.zero_()
    torch.testing.assert_close(block(x), x)


def test_block_equals_torch_encoder_layer() -> None:
    ours = TransformerBlock(16, SelfAttention(16, heads=2), FeedForward(16, 64))
    theirs = torch.nn.TransformerEncoderLayer(
        16, 2, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    attention = theirs.self_attn
    attention.in_proj_weight.data = torch.cat(
        [part.weight for part in (ours.attention.query, ours.attention.key, ours.attention.value)]
    )
    attention.out_proj.load_state_dict(ours.attention.out.state_dict())
    theirs.linear1.load_state_dict(ours.feed_forward.up.state_dict())
    theirs.linear2.load_state_dict(ours.feed_forward.down.state_dict())
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(ours(x), theirs(x))


def test_initial_sizes_also_after_the_meta_device() -> None:
    torch.manual_seed(0)
    with torch.device("meta"):
        layer, table = Linear(400, 400, std=residual_std(8)), Embedding(400, 400)
    for module in (layer, table):
        module.to_empty(device="cpu")
        module.reset_parameters()
    assert layer.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert table.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert not layer.bias.any()
