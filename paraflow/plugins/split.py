"""Split layers beside replicas: features are made on each rank's own samples, a large layer is split over those ranks.

Whale's answer to classification with very many classes (Jia et al. 2022). The ranks bring their features together, each
computes its part of the classes for the samples of all, and the loss needs three numbers a sample from each of them:
no rank ever has all logits, and the gradients of the layer stay where it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from paraflow.births import require_same_births
from paraflow.collectives import broadcast
from paraflow.errors import ModelError, PlanError
from paraflow.optim.held import Held
from paraflow.optim.kinds import is_elementwise
from paraflow.parts import is_spread, local
from paraflow.plan import Plan
from paraflow.plugins.base import Phase, Plugin
from paraflow.rules import Rule

if TYPE_CHECKING:
    from paraflow.engine import Engine
    from paraflow.tensor_parallel.layout import Kind
    from paraflow.tensor_parallel.region import Region

_BUCKET_BYTES = 25 * 2**20

RULES = (
    Rule(
        "split-with-fsdp",
        lambda f: f.plan.fsdp > 1,
        "split divides layers over the ranks that hold replicas (dp), and fsdp={f.plan.fsdp} leaves each of these only "
        "a shard of the model.",
        "Write dp in place of fsdp, or leave the split out: fsdp shards the large layer too.",
    ),
    Rule(
        "split-beside-replicas",
        lambda f: f.plan.tp > 1 or f.plan.pp > 1 or f.plan.cp > 1,
        "split divides layers over data ranks, and under the plan ({f.plan}) a replica takes several ranks itself.",
        "Open the split inside the replica (or stage): replica{{split}}, or leave out tp, pp and cp.",
    ),
    Rule(
        "split-with-offload",
        lambda f: f.plan.cpu_offload is not None,
        "split keeps its parts of a layer, and their optimizer state, on the device that computes with them.",
        "Leave cpu_offload out: each rank holds a part only.",
    ),
    Rule(
        "split-compile",
        lambda f: f.plan.compile and f.plan.dp > 1,
        "compile=True was asked for beside split, and the collectives inside of layers are not compiled yet.",
        "Leave one of them out.",
    ),
)


class Split(Plugin):
    """Splits some modules over the data ranks, each of which has samples of its own.

    Linear layers are split by their outputs, what comes back from the last one are logits of which each rank has some
    (`paraflow.tensor_parallel.SplitLogits`): losses, accuracies and predictions take them as they take whole ones. Two
    layers with only elementwise functions between them are split by inner features, and nothing is sent in between. All
    else inside the modules is replicated.

    Args:
        modules: The names of the modules, or patterns of them.
        plan: How single linear layers in them are split: ``"colwise"`` by outputs or ``"rowwise"`` by inputs, by name.
            What is left out is decided by shapes.

    Example:
        >>> Split(["head"]).describe()
        'split over the data ranks: head'
    """

    name = "split"
    phase = Phase.SPLIT
    rules: ClassVar[tuple[Rule, ...]] = RULES

    def __init__(self, modules: Sequence[str], *, plan: Mapping[str, str] | None = None) -> None:
        if isinstance(modules, str) or not modules:
            raise PlanError(f"Split(modules=...) takes a list of names of modules, not {modules!r}: Split(['head']).")
        self.modules = tuple(modules)
        self._plan = dict(plan or {})
        self._spread: set[str] = set()
        self._described = f"split over the data ranks: {', '.join(self.modules)}"

    def transform(self, module: nn.Module, engine: Engine) -> nn.Module:
        """Leaves this rank its part of the layers; every rank's is of the first one's values."""
        if engine.mesh.degree("dp") == 1:
            return module
        from paraflow.tensor_parallel.region import Region

        model = engine.module
        kinds = kinds_of(model, self.modules, self._plan)
        parameters = [p for name in kinds for p in model.get_submodule(name)._parameters.values() if p is not None]
        if not any(is_spread(parameter) for parameter in parameters):
            require_same_births(model, engine.mesh)
            real = [parameter for parameter in parameters if not parameter.is_meta]
            broadcast(list(dict.fromkeys(real)), engine.mesh.group("dp"), _BUCKET_BYTES)
        split_layers(model, kinds, Region(engine.mesh.device_mesh("dp"), gathers=0))
        held = {name: p for name, p in model.named_parameters() if is_spread(p)}
        self._spread = set(held)
        self._described = (
            f"split over {engine.mesh.degree('dp')} data ranks: {', '.join(kinds)} "
            f"({sum(p.numel() for p in held.values()):,} parameters), whose inputs are brought together"
        )
        return module

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, engine: Engine) -> torch.optim.Optimizer:
        """Gives the optimizer plain tensors, this rank's parts.

        Raises:
            ModelError: It looks at whole parameters.
        """
        if not self._spread:
            return optimizer
        if not is_elementwise(optimizer):
            raise ModelError(
                f"{type(optimizer).__name__} looks at more than single elements (or is looked on at), and of "
                f"{', '.join(sorted(self._spread))} each rank has a part only. Use an optimizer that treats elements "
                "one by one, such as adamw or sgd, or leave the split out."
            )
        engine.update.hold(_part_of)
        return optimizer

    def partitioned_over(self, name: str, parameter: nn.Parameter) -> Sequence[str]:
        """The data ranks, for what is split."""
        return ("dp",) if name in self._spread else ()

    def describe(self) -> str:
        """Returns one line for the printed plan."""
        return self._described


def _part_of(held: Held) -> torch.Tensor:
    if not is_spread(held.tensor):
        return held.tensor
    return nn.Parameter(local(held.tensor).detach(), requires_grad=held.tensor.requires_grad)


def kinds_of(model: nn.Module, modules: Sequence[str], plan: Mapping[str, str] | None = None) -> dict[str, Kind]:
    """Returns how the layers inside some modules are split over data ranks, by name.

    Args:
        model: The model; it may be on the meta device.
        modules: Names or patterns of modules.
        plan: What was said of single layers.

    Raises:
        PlanError: A name is not known, or there is no layer to split.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2000))
        >>> kinds_of(net, ["2"])
        {'2': 'logits'}
        >>> kinds_of(net, ["2"], {"2": "rowwise"})
        {'2': 'rowwise'}
    """
    from paraflow.tensor_parallel.layout import layout_of

    said = dict(plan or {})
    layout = layout_of(model, {name: kind for name, kind in said.items() if kind == "rowwise"}, modules)
    kinds: dict[str, Kind] = {}
    kinds.update({name: kind for name, kind in layout.kinds.items() if kind not in ("partial", "replicate")})
    attention = {name for heads in layout.attentions for name in heads.layers}
    for name, kind in lone_layers(model, modules).items():
        if name not in kinds and name not in attention:
            kinds[name] = kind
    if not kinds:
        raise PlanError(
            f"Nothing in {', '.join(modules)} of {type(model).__name__} can be split over data ranks: it takes linear "
            "layers and embeddings. Take the split away, or put it around such a layer."
        )
    return kinds


def lone_layers(model: nn.Module, modules: Sequence[str]) -> dict[str, Kind]:
    """Returns how single layers inside some modules are split, whatever their sizes, by name.

    They are the linear layers that are called as such, of which the last one of the model gives logits, and the
    embeddings that share their weights with no other layer.
    """
    from paraflow.tensor_parallel.layers import is_linear

    last = next((name for name, layer in reversed(_called(model)) if is_linear(layer)), None)
    found: dict[str, Kind] = {}
    for name, layer in _inside(model, modules):
        if is_linear(layer):
            found[name] = "logits" if name == last else "colwise_joined"
        elif _is_table(model, layer):
            found[name] = "vocabulary"
    return found


def _called(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers with a weight of their own that nothing around them reads directly, by name."""
    from paraflow.tensor_parallel.derive import mentions

    kinds = {type(module) for module in model.modules()}
    found: list[tuple[str, nn.Module]] = []
    whole: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) or hasattr(module, "parametrizations"):
            whole.append(f"{name}." if name else "")
        if module._parameters.get("weight") is None or any(f"{name}.".startswith(prefix) for prefix in whole):
            continue
        weight = rf"{name.rpartition('.')[2]}\.weight"
        if not any(mentions(kind, weight) for kind in kinds):
            found.append((name, module))
    return found


def _inside(model: nn.Module, modules: Sequence[str]) -> list[tuple[str, nn.Module]]:
    names = [name for name, _ in model.named_modules()]
    tops = [f"{name}." if name else "" for name in names if any(name == m or fnmatchcase(name, m) for m in modules)]
    return [(name, layer) for name, layer in _called(model) if any(f"{name}.".startswith(top) for top in tops)]


def _is_table(model: nn.Module, layer: nn.Module) -> bool:
    if not isinstance(layer, nn.Embedding) or type(layer).forward is not nn.Embedding.forward:
        return False
    if layer.sparse or layer.max_norm is not None or layer.scale_grad_by_freq:
        return False
    return sum(other._parameters.get("weight") is layer._parameters["weight"] for other in model.modules()) == 1


def split_layers(model: nn.Module, kinds: Mapping[str, Kind], region: Region) -> None:
    """Splits layers in place, as `kinds` says."""
    from paraflow.tensor_parallel.layers import split_columns, split_rows
    from paraflow.tensor_parallel.vocabulary import split_head, split_vocabulary

    for name, kind in kinds.items():
        layer: Any = model.get_submodule(name)
        if kind == "rowwise":
            split_rows(layer, region)
        elif kind == "vocabulary":
            split_vocabulary(layer, region)
        elif kind == "logits":
            split_head(layer, region)
        else:
            split_columns(layer, region, joins=kind == "colwise_joined")


def from_plan(plan: Plan, options: Mapping[str, Any]) -> Split | None:
    """Returns the plugin that a plan asks for, or None."""
    return Split(**options) if options and plan.data_ranks > 1 else None
