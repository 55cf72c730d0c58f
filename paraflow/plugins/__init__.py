"""Strategies, one a file, behind one small protocol."""

from paraflow.plugins.accumulation import GradientAccumulation
from paraflow.plugins.base import Phase, Plugin
from paraflow.plugins.clipping import Clipping
from paraflow.plugins.communication import HalfCommunication
from paraflow.plugins.compile import Compile
from paraflow.plugins.data_parallel import DataParallel
from paraflow.plugins.optimizer import OptimizerImplementation
from paraflow.plugins.precision import Precision

__all__ = [
    "Clipping",
    "Compile",
    "DataParallel",
    "GradientAccumulation",
    "HalfCommunication",
    "OptimizerImplementation",
    "Phase",
    "Plugin",
    "Precision",
]
