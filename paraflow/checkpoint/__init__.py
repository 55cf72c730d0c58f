"""Checkpoints: the state of a run on disk, whole or not at all."""

from paraflow.checkpoint.run import find, load_model, saved_in

__all__ = ["find", "load_model", "saved_in"]
