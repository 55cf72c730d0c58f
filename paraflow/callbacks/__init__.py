"""Callbacks: code at the events of a run."""

from paraflow.callbacks.base import HOOKS, Callback
from paraflow.callbacks.checkpoint import Checkpoint
from paraflow.callbacks.function import LambdaCallback
from paraflow.callbacks.progress import ProgressBar
from paraflow.loggers.csv import CSVLogger

__all__ = ["HOOKS", "CSVLogger", "Callback", "Checkpoint", "LambdaCallback", "ProgressBar"]
