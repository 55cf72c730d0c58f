"""Collectives over many tensors at once."""

from paraflow.collectives.buckets import add_up, average, broadcast

__all__ = ["add_up", "average", "broadcast"]
