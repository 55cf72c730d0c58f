"""The watch over a run: signals, ranks that fail and ranks that stall, told to all ranks beside the collectives."""

from paraflow.watch.watch import Watch

__all__ = ["Watch"]
