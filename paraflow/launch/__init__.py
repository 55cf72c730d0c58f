"""Starting the ranks of a run, and asking which rank this process is."""

from __future__ import annotations

from paraflow.launch.environment import is_main, local_rank, local_world_size, rank, world_size
from paraflow.launch.spawn import spawn

__all__ = ["is_main", "local_rank", "local_world_size", "rank", "spawn", "world_size"]
