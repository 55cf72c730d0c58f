"""What backward needs of a block: kept, computed again, or waiting on the host."""

from paraflow.recompute.blocks import matching_blocks, repeated_blocks, within_units
from paraflow.recompute.caches import Caches
from paraflow.recompute.treated import TreatedBlocks, TreatedSteps

__all__ = ["Caches", "TreatedBlocks", "TreatedSteps", "matching_blocks", "repeated_blocks", "within_units"]
