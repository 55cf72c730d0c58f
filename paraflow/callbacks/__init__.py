"""Callbacks: code at the events of a run. Each is imported when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paraflow.lazy import lazy_names

if TYPE_CHECKING:
    from paraflow.callbacks.base import HOOKS, Callback
    from paraflow.callbacks.batch_size_finder import BatchSizeFinder
    from paraflow.callbacks.checkpoint import Checkpoint
    from paraflow.callbacks.early_stopping import EarlyStopping
    from paraflow.callbacks.ema import EMA
    from paraflow.callbacks.function import LambdaCallback
    from paraflow.callbacks.learning_rate_finder import LearningRateFinder
    from paraflow.callbacks.learning_rate_monitor import LearningRateMonitor
    from paraflow.callbacks.memory_monitor import MemoryMonitor
    from paraflow.callbacks.model_summary import ModelSummary
    from paraflow.callbacks.nan_guard import NaNGuard
    from paraflow.callbacks.profiler import Profiler
    from paraflow.callbacks.progress import ProgressBar
    from paraflow.callbacks.throughput import Throughput
    from paraflow.callbacks.time_limit import TimeLimit
    from paraflow.callbacks.weight_averaging import StochasticWeightAveraging

__all__ = [
    "EMA",
    "HOOKS",
    "BatchSizeFinder",
    "Callback",
    "Checkpoint",
    "EarlyStopping",
    "LambdaCallback",
    "LearningRateFinder",
    "LearningRateMonitor",
    "MemoryMonitor",
    "ModelSummary",
    "NaNGuard",
    "Profiler",
    "ProgressBar",
    "StochasticWeightAveraging",
    "Throughput",
    "TimeLimit",
]

_HOMES = {
    "HOOKS": "base",
    "Callback": "base",
    "BatchSizeFinder": "batch_size_finder",
    "Checkpoint": "checkpoint",
    "EarlyStopping": "early_stopping",
    "EMA": "ema",
    "LambdaCallback": "function",
    "LearningRateFinder": "learning_rate_finder",
    "LearningRateMonitor": "learning_rate_monitor",
    "MemoryMonitor": "memory_monitor",
    "ModelSummary": "model_summary",
    "NaNGuard": "nan_guard",
    "Profiler": "profiler",
    "ProgressBar": "progress",
    "Throughput": "throughput",
    "TimeLimit": "time_limit",
    "StochasticWeightAveraging": "weight_averaging",
}


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
