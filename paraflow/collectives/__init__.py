"""Collectives over many tensors at once."""

from paraflow.collectives.buckets import average, broadcast

__all__ = ["average", "broadcast"]
