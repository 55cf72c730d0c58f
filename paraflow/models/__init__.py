"""Templates to subclass, and how any module is told how to train."""

from paraflow.models.causal_lm import CausalLM, CausalLMConfig
from paraflow.models.classifier import Classifier, ClassifierConfig
from paraflow.models.masked_lm import MaskedLM, MaskedLMConfig
from paraflow.models.masking import MaskingCollator
from paraflow.models.model import Model
from paraflow.models.recipe import Recipe, configure

__all__ = [
    "CausalLM",
    "CausalLMConfig",
    "Classifier",
    "ClassifierConfig",
    "MaskedLM",
    "MaskedLMConfig",
    "MaskingCollator",
    "Model",
    "Recipe",
    "configure",
]
