"""The random state of every rank."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from paraflow.mesh import Mesh


def random_state(mesh: Mesh) -> list[dict[str, Any]]:
    """Returns the state of torch's, Python's and numpy's generators of each rank: a collective."""
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    columns = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(np.append(np.asarray(keys, dtype=np.int64), position)),
        "gauss": torch.tensor(
            [float("nan") if gauss is None else gauss, float(has_gauss), float(cached)], dtype=torch.float64
        ),
    }
    if mesh.device.type == "cuda":
        columns["device"] = torch.cuda.get_rng_state(mesh.device)
    gathered = {name: _gather(mesh, column) for name, column in columns.items()}
    return [{name: parts[rank] for name, parts in gathered.items()} for rank in range(mesh.world_size)]


def _gather(mesh: Mesh, column: torch.Tensor) -> list[torch.Tensor]:
    if mesh.device.type != "cuda":
        return mesh.all_gather(column)
    return [part.cpu() for part in mesh.all_gather(column.to(mesh.device))]


def restore_random_state(states: list[dict[str, Any]], mesh: Mesh) -> None:
    """Gives this rank its state back; a run on another number of ranks keeps the state it was seeded with."""
    if len(states) != mesh.world_size:
        return
    state = states[mesh.rank]
    torch.set_rng_state(state["torch"])
    gauss, has_gauss, cached = state["gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), None if np.isnan(gauss) else gauss))
    numbers = state["numpy"].numpy()
    np.random.set_state(("MT19937", numbers[:-1].astype(np.uint32), int(numbers[-1]), int(has_gauss), cached))
    if "device" in state and mesh.device.type == "cuda":
        torch.cuda.set_rng_state(state["device"], mesh.device)
