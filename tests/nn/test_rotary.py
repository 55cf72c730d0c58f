from __future__ import annotations

import copy

import pytest
import torch

from paraflow.errors import ModelError
from paraflow.nn import Rotary


def test_positions_are_rotations_of_pairs() -> None:
    rotary = Rotary(head_dim=4, base=100.0)
    x = torch.randn(1, 1, 6, 4)
    turned = rotary(x)
    for position in range(6):
        for pair, frequency in enumerate((1.0, 100.0**-0.5)):
            number = torch.complex(x[0, 0, position, pair], x[0, 0, position, pair + 2])
            expected = number * torch.polar(torch.tensor(1.0), torch.tensor(position * frequency))
            torch.testing.assert_close(turned[0, 0, position, pair], expected.real)
            torch.testing.assert_close(turned[0, 0, position, pair + 2], expected.imag)


def test_dot_product_depends_on_distance_alone() -> None:
    rotary = Rotary(head_dim=16)
    query, key = torch.randn(2, 16)
    turned_queries = rotary(query.expand(1, 1, 20, 16))[0, 0]
    turned_keys = rotary(key.expand(1, 1, 20, 16))[0, 0]
    scores = turned_queries @ turned_keys.T
    for distance in (-3, 0, 5):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(scores[0, 0], scores[0, 5])


def test_given_positions_are_used() -> None:
    rotary = Rotary(head_dim=8)
    x = torch.randn(2, 3, 10, 8)
    torch.testing.assert_close(rotary(x[:, :, 4:], torch.arange(4, 10)), rotary(x)[:, :, 4:])


def test_table_grows_and_survives_moves() -> None:
    expected = Rotary(head_dim=8)(torch.ones(1, 1, 12, 8))
    with torch.device("meta"):
        rotary = Rotary(head_dim=8)
    assert rotary(torch.ones(1, 1, 3, 8, device="meta")).device.type == "meta"
    rotary.to_empty(device="cpu")
    rotary(torch.ones(1, 1, 4, 8))
    torch.testing.assert_close(rotary(torch.ones(1, 1, 12, 8)), expected)
    torch.testing.assert_close(copy.deepcopy(rotary).half()(torch.ones(1, 1, 12, 8)), expected)
    assert not rotary.state_dict()


def test_table_made_in_inference_mode_can_be_trained_with() -> None:
    rotary = Rotary(head_dim=8)
    with torch.inference_mode():
        rotary(torch.ones(1, 1, 5, 8))
    x = torch.ones(1, 1, 5, 8, requires_grad=True)
    rotary(x).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * torch.ones_like(x))


def test_angles_are_exact_in_half_precision() -> None:
    rotary = Rotary(head_dim=8)
    x = torch.ones(1, 1, 3000, 8)
    half = rotary(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half, rotary(x).bfloat16())


def test_odd_head_is_refused() -> None:
    with pytest.raises(ModelError, match="even number"):
        Rotary(head_dim=7)
