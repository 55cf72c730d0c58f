"""The profiler: what a module needs, measured."""

from paraflow.profiler.activations import activation_bytes, free_memory

__all__ = ["activation_bytes", "free_memory"]
