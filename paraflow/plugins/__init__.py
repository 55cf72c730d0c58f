"""Strategies, one a file, behind one small protocol."""

from paraflow.plugins.accumulation import GradientAccumulation
from paraflow.plugins.activation_checkpointing import ActivationCheckpointing
from paraflow.plugins.apply_groups import ApplyGroups
from paraflow.plugins.base import Phase, Plugin
from paraflow.plugins.clipping import Clipping
from paraflow.plugins.communication import HalfCommunication
from paraflow.plugins.compile import Compile
from paraflow.plugins.cpu_offload import CPUOffload
from paraflow.plugins.data_parallel import DataParallel
from paraflow.plugins.fsdp import FSDP
from paraflow.plugins.optimizer import OptimizerImplementation
from paraflow.plugins.pipeline import Pipeline
from paraflow.plugins.precision import Precision
from paraflow.plugins.split import Split
from paraflow.plugins.tensor_parallel import TensorParallel

__all__ = [
    "FSDP",
    "ActivationCheckpointing",
    "ApplyGroups",
    "CPUOffload",
    "Clipping",
    "Compile",
    "DataParallel",
    "GradientAccumulation",
    "HalfCommunication",
    "OptimizerImplementation",
    "Phase",
    "Pipeline",
    "Plugin",
    "Precision",
    "Split",
    "TensorParallel",
]
