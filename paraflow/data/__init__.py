"""Data: global batches divided over ranks and micro-batches, in an order that depends on seed and epoch only."""

from paraflow.data.batch import Batch, MicroBatch
from paraflow.data.convert import as_source, as_validation_source
from paraflow.data.division import Division
from paraflow.data.feed import Feed
from paraflow.data.source import Reader, Source
from paraflow.data.stream import PerRank

__all__ = [
    "Batch",
    "Division",
    "Feed",
    "MicroBatch",
    "PerRank",
    "Reader",
    "Source",
    "as_source",
    "as_validation_source",
]
