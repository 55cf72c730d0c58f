"""The plan that a transformers model brings along (``_tp_plan``), in our words."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from paraflow.tensor_parallel.derive import is_linear

_WORDS = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_rep": "colwise_joined",
    "colwise_gather_output": "colwise_joined",
    "embedding_rowwise": "vocabulary",
    "replicated_with_grad_allreduce": "partial",
    "replicate": "replicate",
}


def plan_of(module: nn.Module) -> dict[str, str]:
    """Returns what a model's own plan says of its layers, by name; nothing where it has none that is understood.

    A plan in which a word is not known (experts, packed weights) is left aside as a whole: its parts depend on each
    other. So is what it says of a layer with a forward of its own.

    Example:
        >>> model = nn.ModuleDict({"up": nn.Linear(2, 4), "down": nn.Linear(4, 2)})
        >>> model._tp_plan = {"up": "colwise", "down": "rowwise"}
        >>> plan_of(model)
        {'up': 'colwise', 'down': 'rowwise'}
    """
    given = getattr(module, "_tp_plan", None)
    if not isinstance(given, dict) or not given:
        return {}
    layers = [name for name, layer in module.named_modules() if is_linear(layer)]
    plan: dict[str, str] = {}
    for pattern, word in given.items():
        matching = [name for name, _ in module.named_modules() if fnmatchcase(name, pattern)]
        if not matching:
            continue
        if word not in _WORDS:
            return {}
        plan.update({name: _kind(module, name, _WORDS[word], layers) for name in matching})
    return plan


def _kind(module: nn.Module, name: str, kind: str, layers: list[str]) -> str:
    """The output layer's classes stay split: whatever is not known to work on them joins them."""
    layer = module.get_submodule(name)
    if kind in ("vocabulary", "colwise_joined") and _is_tied_to_own_code(module, layer):
        return "replicate"
    if kind == "colwise_joined" and is_linear(layer):
        return "logits" if name == layers[-1] else kind
    if kind in ("colwise", "rowwise", "colwise_joined") and not is_linear(layer):
        return "replicate"
    if kind == "vocabulary" and not isinstance(layer, nn.Embedding):
        return "replicate"
    return kind


def _is_tied_to_own_code(module: nn.Module, layer: nn.Module) -> bool:
    """Whether a layer's weight is that of an embedding with a forward of its own, such as Gemma's, which scales."""
    if layer._parameters.get("weight") is None:
        return False
    tables = [
        m for m in module.modules() if isinstance(m, nn.Embedding) and type(m).forward is not nn.Embedding.forward
    ]
    return any(layer._parameters.get("weight") is table._parameters["weight"] for table in tables)
