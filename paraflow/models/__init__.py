"""Templates to subclass, and how any module is told how to train."""

from paraflow.models.model import Model
from paraflow.models.recipe import Recipe, configure

__all__ = ["Model", "Recipe", "configure"]
