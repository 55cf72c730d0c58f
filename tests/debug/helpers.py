"""What the tests of the check share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import paraflow as pf
from paraflow.debug.calls import COLLECTIVES
from paraflow.mesh import Mesh


def site_in(file: str, mark: str, function: str) -> str:
    """The place of the line of a test file that ends with a mark."""
    lines = [n for n, line in enumerate(Path(file).read_text().splitlines(), 1) if line.endswith(f"# line: {mark}")]
    assert len(lines) == 1, f"{mark} marks lines {lines}"
    return f"{Path(file).name}:{lines[0]} in {function}"


def world() -> Mesh:
    return Mesh(pf.Plan(dp=int(os.environ["WORLD_SIZE"])), torch.device("cpu"))


def held() -> dict[str, Any]:
    """The functions that torch.distributed holds now."""
    names = {name: vars(dist.distributed_c10d).get(name) for name in COLLECTIVES}
    names.update({f"dist.{name}": vars(dist).get(name) for name in COLLECTIVES})
    return names
