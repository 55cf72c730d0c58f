"""What ranks have measured, made the same on all of them, so that all choose the same."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from paraflow.planner.blocks import BlockProfile, Operation, Profile

if TYPE_CHECKING:
    from paraflow.mesh import Mesh


def largest(mesh: Mesh, number: int) -> int:
    """Returns the largest of all ranks' numbers."""
    return max(int(one) for one in mesh.all_gather(torch.tensor([number])))


def agreed(mesh: Mesh, profile: Profile, say: Callable[[str], None]) -> Profile:
    """Returns a profile that is the same on all ranks.

    Where all have called the same operators of the same blocks, each figure is the largest of all ranks. Where they
    have not, as when the data decides what a block does, the profile of the rank that keeps the most is everybody's.

    Args:
        mesh: The ranks.
        profile: This rank's.
        say: Prints a line on rank 0.
    """
    if mesh.world_size == 1:
        return profile
    shape = zlib.crc32(repr([(part.name, _called(part)) for part in profile.parts]).encode())
    shapes = {int(one) for one in mesh.all_gather(torch.tensor([shape]))}
    if len(shapes) == 1:
        figures = mesh.all_gather(torch.tensor(profile.numbers(), dtype=torch.float64))
        return profile.with_numbers(torch.stack(figures).amax(0).tolist())
    kept = [int(one) for one in mesh.all_gather(torch.tensor([profile.kept]))]
    rank = kept.index(max(kept))
    say(
        "activation_checkpointing: the ranks have called different operators; what is chosen for rank "
        f"{rank}, which keeps the most, holds for all"
    )
    # Each gathers all, which is paid where ranks differ only.
    return _from_text(mesh.gather_texts(json.dumps(asdict(profile)))[rank])


def _called(part: BlockProfile) -> list[tuple[str, int]]:
    return [(op.name, op.occurrence) for op in part.operations]


def _from_text(text: str) -> Profile:
    stored = json.loads(text)
    parts = [
        BlockProfile(**{**part, "operations": tuple(Operation(**op) for op in part["operations"])})
        for part in stored["parts"]
    ]
    return Profile(tuple(parts), stored["seconds"])
