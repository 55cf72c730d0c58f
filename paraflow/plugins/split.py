"""Split layers beside replicas: features are made on each rank's own samples, a large layer is split over those ranks.

Whale's answer to classification with very many classes (Jia et al. 2022). The ranks bring their features together, each
computes its part of the classes for the samples of all, and the loss needs three numbers a sample from each of them:
no rank ever has all logits, and the gradients of the layer stay where it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from paraflow.births import require_same_births
from paraflow.collectives import average, broadcast
from paraflow.errors import ModelError, PlanError
from paraflow.optim.held import Held
from paraflow.optim.kinds import is_elementwise
from paraflow.parts import is_spread, local
from paraflow.plan import Plan
from paraflow.plugins.base import Phase, Plugin
from paraflow.plugins.precision import DTYPES
from paraflow.rules import Rule

if TYPE_CHECKING:
    from paraflow.engine import Engine
    from paraflow.tensor_parallel.layout import Kind
    from paraflow.tensor_parallel.region import Region

_BUCKET_BYTES = 25 * 2**20
_EARLIER = "_paraflow_split_kinds"

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


def _own_rules(degree: int | None) -> Iterator[Rule]:
    """The rows for a degree."""
    if degree is None:
        return
    yield Rule(
        "split-degree-divides",
        lambda f: f.plan.dp % degree != 0,
        f"split is over {degree} ranks, which do not divide the {{f.plan.dp}} data ranks.",
        f"Start a multiple of {degree} processes, or leave the number out, which splits over all of them.",
    )


class Split(Plugin):
    """Splits some modules over the data ranks, each of which has samples of its own.

    Linear layers are split by their outputs, what comes back from the last one are logits of which each rank has some
    (`paraflow.tensor_parallel.SplitLogits`): losses, accuracies and predictions take them as they take whole ones. Two
    layers with only elementwise functions between them are split by inner features, and nothing is sent in between. All
    else inside the modules is replicated.

    Args:
        modules: The names of the modules, or patterns of them.
        plan: How single layers in them are split, by name or pattern: ``"colwise"`` by outputs, ``"rowwise"`` by
            inputs, ``"vocabulary"``, ``"logits"``, or ``"replicate"``. What is left out is decided by shapes.
        degree: Over how many of the data ranks, neighbours of each other; None is all. With fewer, there are several
            replicas of the split layers, which average their gradients.

    Example:
        >>> Split(["head"]).describe()
        'split over the data ranks: head'
    """

    name = "split"
    phase = Phase.SPLIT
    rules: ClassVar[tuple[Rule, ...]] = RULES

    def __init__(
        self, modules: Sequence[str], *, plan: Mapping[str, str] | None = None, degree: int | None = None
    ) -> None:
        if isinstance(modules, str) or not modules:
            raise PlanError(f"Split(modules=...) takes a list of names of modules, not {modules!r}: Split(['head']).")
        self.modules = tuple(modules)
        if plan is not None and not isinstance(plan, Mapping):
            raise PlanError(f"Split(plan=...) maps names or patterns of layers to how they are split, not {plan!r}.")
        if degree is not None and (not isinstance(degree, int) or degree < 2):
            raise PlanError(
                f"Split(degree=...) is a whole number of at least 2, or None for all ranks, not {degree!r}."
            )
        self._plan = dict(plan or {})
        self.degree = degree
        self.rules = (*RULES, *_own_rules(degree))  # type: ignore[misc]  # known before launch, too
        self._dim, self._replicas = "dp", 1
        self._spread: set[str] = set()
        self._described = f"split over the data ranks: {', '.join(self.modules)}"

    def transform(self, module: nn.Module, engine: Engine) -> nn.Module:
        """Leaves this rank its part of the layers; every rank's is of the first one's values."""
        if engine.mesh.degree("dp") == 1:
            return module
        from paraflow.tensor_parallel.outside import Guarded
        from paraflow.tensor_parallel.region import Region

        self._fold(engine)
        model = engine.module
        kinds = kinds_of(model, self.modules, self._plan)
        parameters = [p for name in kinds for p in model.get_submodule(name)._parameters.values() if p is not None]
        if not any(is_spread(parameter) for parameter in parameters):
            require_same_births(model, engine.mesh)
            real = [parameter for parameter in parameters if not parameter.is_meta]
            broadcast(list(dict.fromkeys(real)), engine.mesh.group("dp"), _BUCKET_BYTES)
        split_layers(model, kinds, Region(engine.mesh.device_mesh(self._dim), gathers=0))
        model.__dict__[_EARLIER] = (self.modules, self._plan), kinds
        held = {name: p for name, p in model.named_parameters() if is_spread(p)}
        self._spread = set(held)
        self._described = (
            f"split over {engine.mesh.degree(self._dim)} data ranks: {', '.join(kinds)} "
            f"({sum(p.numel() for p in held.values()):,} parameters), whose inputs are brought together"
            + (f", in {self._replicas} replicas" if self._replicas > 1 else "")
        )
        return Guarded(module)

    def _fold(self, engine: Engine) -> None:
        """Makes groups of ranks that split layers between them, where they are not all."""
        ranks = engine.mesh.degree("dp")
        if self.degree is not None and self.degree < ranks:
            engine.mesh.fold("dp", self.degree)
            self._dim, self._replicas = "dp_inner", ranks // self.degree

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
        return (self._dim,) if name in self._spread else ()

    def reduce_gradients(self, engine: Engine) -> None:
        """Averages the gradients of what is split over its replicas, where there are several."""
        if self._replicas == 1:
            return
        parameters = [p for name, p in engine.module.named_parameters() if name in self._spread and p.requires_grad]
        used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
        engine.mesh.all_reduce(used, ("dp_outer",), "max")  # on the host: no device is waited for
        gradients = []
        for parameter, is_used in zip(parameters, used.tolist(), strict=True):
            if is_used and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients += [local(parameter.grad)] if parameter.grad is not None else []
        average(gradients, engine.mesh.group("dp_outer"), _BUCKET_BYTES, DTYPES.get(engine.plan.comm_hook or ""))

    def completes_gradient(self, name: str, parameter: nn.Parameter) -> bool:
        """Of the same parameters."""
        return self._replicas > 1 and name in self._spread

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
        PlanError: A name or kind is not known, a layer shares a parameter with one that stays whole, or there is no
            layer to split.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2000))
        >>> kinds_of(net, ["2"])
        {'2': 'logits'}
        >>> kinds_of(net, ["2"], {"2": "rowwise"})
        {'2': 'rowwise'}
    """
    asked = tuple(modules), dict(plan or {})
    earlier: tuple[Any, dict[str, Kind]] | None = model.__dict__.get(_EARLIER)
    if earlier is not None and earlier[0] == asked:  # split by an earlier Trainer, it no longer looks splittable
        return earlier[1]
    said = _expanded(model, modules, plan or {})
    explicit: dict[str, Kind] = {}
    while True:
        kinds = _derived(model, modules, explicit)
        unheard = {name: kind for name, kind in said.items() if not _agrees(kind, kinds.get(name))}
        if not unheard:
            break
        last = _last_linear(model)
        for name, kind in unheard.items():
            by_outputs: Kind = "logits" if name == last else "colwise_joined"
            explicit[name] = by_outputs if kind == "colwise" else kind
    kinds = {name: kind for name, kind in kinds.items() if kind not in ("partial", "replicate")}
    if not kinds:
        raise PlanError(
            f"Nothing in {', '.join(modules)} of {type(model).__name__} can be split over data ranks: it takes linear "
            "layers and embeddings. Take the split away, or put it around such a layer."
        )
    _require_ties(model, kinds)
    return kinds


def _expanded(model: nn.Module, modules: Sequence[str], plan: Mapping[str, str]) -> dict[str, Kind]:
    """What was said of single layers, by name; each is in one of the modules."""
    from paraflow.tensor_parallel.layout import expanded

    said = expanded(model, plan, "Split")
    inside = set(_names_inside(model, modules))
    for name, kind in said.items():
        if name not in inside or kind == "partial":
            why = "is in none of its modules" if name not in inside else "cannot be 'partial' over data ranks"
            raise PlanError(
                f"Split's plan says {kind!r} of {name!r}, which {why} ({', '.join(modules)}). Write a layer in them, "
                "and 'colwise', 'rowwise', 'vocabulary', 'logits' or 'replicate' of it."
            )
    return said


def _derived(model: nn.Module, modules: Sequence[str], explicit: Mapping[str, Kind]) -> dict[str, Kind]:
    """How layers are split by their shapes, where nothing explicit is said of them."""
    from paraflow.tensor_parallel.layout import layout_of

    layout = layout_of(model, explicit, modules)
    attention = {name for heads in layout.attentions for name in heads.layers}
    lone = {name: kind for name, kind in lone_layers(model, modules).items() if name not in attention}
    return {**lone, **layout.kinds}


def _agrees(said: Kind, kind: Kind | None) -> bool:
    """Whether a layer is split as was said; "colwise" is any way that divides outputs."""
    return kind == said or (said == "colwise" and kind in ("colwise_joined", "logits"))


def _require_ties(model: nn.Module, kinds: Mapping[str, Kind]) -> None:
    """A parameter of several layers is split in all of them, and along one dimension."""
    ways: dict[int, list[tuple[str, str]]] = {}
    for name, layer in model.named_modules():
        for key, parameter in layer._parameters.items():
            if parameter is not None:
                way = _way(kinds.get(name), key)
                ways.setdefault(id(parameter), []).append((f"{name}.{key}", way))
    for owners in ways.values():
        if len({way for _, way in owners}) > 1:
            split = next(name for name, way in owners if way != "whole")
            other = next(name for name, way in owners if way != dict(owners)[split])
            raise PlanError(
                f"{split} and {other} are one parameter, and the split would divide only the first, or them in "
                "different ways, so that they came apart. Put both layers into the split (an embedding and the output "
                "layer tied to it are both divided by their rows), or neither, or untie them."
            )


def _way(kind: Kind | None, key: str) -> str:
    """How a parameter of a layer is divided."""
    if kind is None:
        return "whole"
    if kind == "rowwise":
        return "columns" if key == "weight" else "whole"
    return "rows"


def lone_layers(model: nn.Module, modules: Sequence[str]) -> dict[str, Kind]:
    """Returns how single layers inside some modules are split, whatever their sizes, by name.

    They are the linear layers that are called as such, of which the last one of the model gives logits (and what is
    tied to an embedding), and embeddings.
    """
    from paraflow.tensor_parallel.layers import is_linear

    last = _last_linear(model)
    tables = {id(layer._parameters["weight"]) for layer in model.modules() if isinstance(layer, nn.Embedding)}
    found: dict[str, Kind] = {}
    for name, layer in _inside(model, modules):
        if is_linear(layer):
            gives_logits = name == last or id(layer._parameters["weight"]) in tables
            found[name] = "logits" if gives_logits else "colwise_joined"
        elif _is_table(layer):
            found[name] = "vocabulary"
    return found


def _last_linear(model: nn.Module) -> str | None:
    """The layer that gives a model's logits: the last linear one that is called as such."""
    from paraflow.tensor_parallel.layers import is_linear

    return next((name for name, layer in reversed(called_layers(model)) if is_linear(layer)), None)


def called_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the layers with a weight of their own that nothing around them reads directly, by name."""
    from paraflow.tensor_parallel.reading import mentions

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


def _names_inside(model: nn.Module, modules: Sequence[str]) -> list[str]:
    names = [name for name, _ in model.named_modules()]
    tops = [f"{name}." if name else "" for name in names if any(name == m or fnmatchcase(name, m) for m in modules)]
    return [name for name in names if any(f"{name}.".startswith(top) for top in tops)]


def _inside(model: nn.Module, modules: Sequence[str]) -> list[tuple[str, nn.Module]]:
    inside = set(_names_inside(model, modules))
    return [(name, layer) for name, layer in called_layers(model) if name in inside]


def _is_table(layer: nn.Module) -> bool:
    if not isinstance(layer, nn.Embedding) or type(layer).forward is not nn.Embedding.forward:
        return False
    return not (layer.sparse or layer.max_norm is not None or layer.scale_grad_by_freq)


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
