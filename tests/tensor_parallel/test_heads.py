"""Which heads a rank computes."""

from __future__ import annotations

import pytest

import paraflow as pf
from paraflow.tensor_parallel.derive import Attention
from paraflow.tensor_parallel.heads import share_of


def attention(heads: int, kv_heads: int) -> Attention:
    return Attention("attention", "q", "k", "v", "o", heads=heads, kv_heads=kv_heads, head_dim=4)


@pytest.mark.parametrize("degree", range(1, 13))
@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 12), (12, 4), (12, 3), (12, 1), (13, 13), (15, 5)])
def test_every_head_is_computed_once_and_sees_its_keys(heads: int, kv_heads: int, degree: int) -> None:
    shares = [share_of(attention(heads, kv_heads), degree, rank) for rank in range(degree)]
    assert [head for share in shares for head in share.queries] == list(range(heads))
    group = heads // kv_heads
    for share in shares:
        own_group, rest = divmod(len(share.queries), len(share.keys))
        assert rest == 0
        seen = [share.keys[at // own_group] for at in range(len(share.queries))]
        assert seen == [head // group for head in share.queries]
        assert share.divides_queries == (heads % degree == 0)
        assert share.divides_keys == (heads % degree == 0 and kv_heads % degree == 0)
    sizes = [len(share.queries) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_a_key_head_is_repeated_only_where_groups_differ() -> None:
    assert share_of(attention(8, 2), 4, 3).keys == (1,)
    assert share_of(attention(6, 2), 4, 1).keys == (0, 1)  # heads 2 and 3, of different groups
    assert share_of(attention(12, 4), 5, 0).keys == (0,)  # heads 0 to 2
    assert share_of(attention(12, 4), 5, 1).keys == (1,)
    assert share_of(attention(15, 5), 4, 0).keys == (0, 0, 0, 1)


def test_fewer_heads_than_ranks_are_refused_with_what_fits() -> None:
    with pytest.raises(pf.PlanError, match=r"6 heads, which tp=8 .* at most 6 \(best one of \[2, 3, 6\]\)"):
        share_of(attention(6, 3), 8, 0)
