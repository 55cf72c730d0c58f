"""Checkpoints: the state of a run on disk, whole or not at all."""

from paraflow.checkpoint.folders import find, saved_in
from paraflow.checkpoint.run import load_model
from paraflow.lazy import lazy_names

__all__ = ["export", "find", "load_model", "saved_in"]

__getattr__ = lazy_names(__name__, {"export": "exporting"})
