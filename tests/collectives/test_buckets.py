"""Collectives over many tensors give what one tensor after another would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from paraflow.collectives import average, broadcast
from paraflow.mesh import Mesh
from paraflow.plan import Plan


def tensors(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shapes: list[tuple[int, ...]] = [(3, 2), (), (5,), (0,), (4, 1)]
    return [torch.randn(shape, generator=generator) for shape in shapes] + [torch.full((2,), float(rank)).double()]


def on_a_rank(bucket_bytes: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    mesh = Mesh(Plan(dp=dist_size()), torch.device("cpu"))
    averaged, shared = tensors(mesh.rank), tensors(mesh.rank)
    average(averaged, mesh.group("dp"), bucket_bytes)
    broadcast(shared, mesh.group("dp"), bucket_bytes)
    return averaged, shared


def dist_size() -> int:
    from paraflow.launch import world_size

    return world_size()


@pytest.mark.parametrize("bucket_bytes", [1, 24, 10**6])
def test_average_and_broadcast(ranks: Any, bucket_bytes: int) -> None:
    expected = [torch.stack(parts).mean(0) for parts in zip(*map(tensors, range(3)), strict=True)]
    for averaged, shared in ranks(3, on_a_rank, bucket_bytes):
        torch.testing.assert_close(averaged, expected)
        torch.testing.assert_close(shared, tensors(0), rtol=0, atol=0)


def laid_out() -> tuple[list[int], float, list[float], int]:
    """A mesh of two stages by two replicas: who is where, and which ranks each collective joins."""
    mesh = Mesh(Plan(pp=2, dp=2), torch.device("cpu"))
    total = float(mesh.all_reduce(torch.tensor(float(mesh.rank)), ("dp",)))
    stage = [float(mesh.all_reduce(torch.tensor(float(mesh.rank)), dims)) for dims in (("pp",), ("pp", "dp"), ("tp",))]
    assert dist.get_world_size(mesh.data_group) == 2
    return [mesh.coordinate("pp"), mesh.coordinate("dp"), mesh.data_rank], total, stage, mesh.data_ranks


def test_a_mesh_lays_ranks_out_outer_to_inner(ranks: Any) -> None:
    places, totals, stages, data_ranks = zip(*ranks(4, laid_out), strict=True)
    assert list(places) == [[0, 0, 0], [0, 1, 1], [1, 0, 0], [1, 1, 1]]
    assert totals == (1.0, 1.0, 5.0, 5.0)
    assert [stage[0] for stage in stages] == [2.0, 4.0, 2.0, 4.0]
    assert [stage[1] for stage in stages] == [6.0] * 4
    assert [stage[2] for stage in stages] == [0.0, 1.0, 2.0, 3.0]
    assert data_ranks == (2, 2, 2, 2)
