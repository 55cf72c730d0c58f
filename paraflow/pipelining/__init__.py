"""Pipelines: a model cut in stages, a step replayed stage by stage, and the order in which ranks run them."""

from typing import TYPE_CHECKING

from paraflow.lazy import lazy_names

if TYPE_CHECKING:
    from paraflow.pipelining.timing import unit_seconds

__all__ = ["unit_seconds"]

__getattr__ = lazy_names(__name__, {"unit_seconds": "timing"})
