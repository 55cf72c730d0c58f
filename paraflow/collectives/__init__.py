"""Collectives over many tensors at once."""

from paraflow.collectives.buckets import add_up, average, broadcast
from paraflow.collectives.overlapped import OverlappedAverage

__all__ = ["OverlappedAverage", "add_up", "average", "broadcast"]
