"""Which layers are split over ranks, and how: from the user's dict, the model's own plan, and what is derived."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, cast

from torch import nn

from paraflow.errors import PlanError, some_of
from paraflow.tensor_parallel.derive import (
    Attention,
    FeedForward,
    find_attentions,
    find_embeddings,
    find_feed_forwards,
    find_heads,
    is_linear,
    parameters_of,
)
from paraflow.tensor_parallel.transformers_plans import plan_of

Kind = Literal["colwise", "colwise_joined", "rowwise", "vocabulary", "logits", "partial", "replicate"]
KINDS: dict[Kind, str] = {
    "colwise": "each rank has some of the output features, and passes them on",
    "colwise_joined": "each rank has some of the output features, and they are joined",
    "rowwise": "each rank has some of the input features, and the outputs are added up",
    "vocabulary": "each rank has some rows of an embedding",
    "logits": "each rank has some classes, of which the loss is computed without joining them",
    "partial": "whole on every rank, each of which sees its own heads, so that gradients are added up",
    "replicate": "whole on every rank",
}
"""What a plan may say of a layer."""

_LINEAR = ("colwise", "colwise_joined", "rowwise", "logits")


@dataclass(frozen=True)
class Layout:
    """How a model is split.

    Attributes:
        kinds: What becomes of the layers that are no part of an attention, by name.
        attentions: The attentions whose heads are shared out.
        unaligned: The layers of `kinds` whose split features need not be equally many on each rank.
        said: The modules of which the user's plan says something.
    """

    kinds: Mapping[str, Kind] = field(default_factory=dict)
    attentions: tuple[Attention, ...] = ()
    unaligned: frozenset[str] = frozenset()
    said: frozenset[str] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the layers that are split."""
        whole = ("partial", "replicate")
        own = [name for name, kind in self.kinds.items() if kind not in whole]
        return tuple(dict.fromkeys([*(name for a in self.attentions for name in a.layers), *own]))

    def __bool__(self) -> bool:
        return bool(self.names)


def layout_of(module: nn.Module, plan: Mapping[str, str] | None = None, modules: Sequence[str] | None = None) -> Layout:
    """Decides how a model is split.

    What the user says of a layer wins, then what the model brings along (``_tp_plan``, as in transformers), then what
    is derived from shapes. A derived group of layers of which the user says anything is left to the user.

    Args:
        module: The model. Layers whose parameters are on other ranks are passed over.
        plan: Kinds by module name or pattern (``"blocks.*.mlp.up": "colwise"``); see `KINDS`.
        modules: Names or patterns of the modules inside which layers are split; None is everywhere.

    Raises:
        PlanError: A name or kind is not known, or a layer does not suit its kind.

    Example:
        >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> layout_of(mlp).kinds
        {'0': 'colwise', '2': 'rowwise'}
    """
    said = expanded(module, plan or {})
    within = _within(module, modules)
    own = {name: cast(Kind, kind) for name, kind in plan_of(module).items() if name in within and name not in said}
    given = {**own, **said}
    attentions = [a for a in find_attentions(module) if _stands(a, given, within)]
    taken = {name for attention in attentions for name in attention.layers}
    given = {name: kind for name, kind in given.items() if name not in taken}
    pairs = [f for f in find_feed_forwards(module, taken) if _is_free(f.layers, given, within)]
    pairs = _without_large_heads(module, pairs)
    kinds: dict[str, Kind] = {}
    for pair in pairs:
        kinds.update({**dict.fromkeys(pair.columns, "colwise"), pair.rows: "rowwise"})
    kinds.update(given)
    kinds.update(_vocabulary(module, {*taken, *kinds}, kinds, within))
    kinds = {name: kind for name, kind in kinds.items() if parameters_of(module, name)}
    _require_ties(module, kinds)
    unaligned = {name for pair in find_feed_forwards(module, taken) for name in pair.layers}
    return Layout(kinds, tuple(attentions), frozenset(unaligned & kinds.keys()), frozenset(said))


def expanded(module: nn.Module, plan: Mapping[str, str], whose: str = "TensorParallel") -> dict[str, Kind]:
    """Returns the user's plan by name: a name beats a pattern, and of patterns the last one wins.

    Args:
        module: The model.
        plan: Kinds by name or pattern.
        whose: The plugin that was given it.

    Raises:
        PlanError: A name or kind is not known, or a layer does not suit its kind.
    """
    names = [name for name, _ in module.named_modules() if name]
    kinds: dict[str, Kind] = {}
    for pattern, kind in sorted(plan.items(), key=lambda item: item[0] in names):
        if kind not in KINDS:
            raise PlanError(
                f"{whose}'s plan says {kind!r} of {pattern!r}, which is nothing that can become of a layer. "
                f"Write one of: {'; '.join(f'{name} ({what})' for name, what in KINDS.items())}."
            )
        matching = [name for name in names if name == pattern or fnmatchcase(name, pattern)]
        suited = [name for name in matching if _suits(module.get_submodule(name), kind)]
        if not suited:
            _refuse(module, pattern, kind, matching, whose)
        kinds.update(dict.fromkeys(suited, kind))
    return kinds


def _refuse(module: nn.Module, pattern: str, kind: str, matching: Sequence[str], whose: str) -> None:
    if matching:
        found = type(module.get_submodule(matching[0])).__name__
        raise PlanError(
            f"{whose}'s plan says {kind!r} of {pattern!r}, which is a {found}. colwise, colwise_joined, rowwise "
            "and logits are for linear layers, vocabulary for embeddings, and neither for classes with a forward of "
            "their own."
        )
    layers = [name for name, layer in module.named_modules() if is_linear(layer) or isinstance(layer, nn.Embedding)]
    raise PlanError(
        f"{whose}'s plan names {pattern!r}, and {type(module).__name__} has no such module. The layers that can "
        f"be split are: {_some(layers)}."
    )


def _suits(layer: nn.Module, kind: Kind) -> bool:
    if kind in _LINEAR:
        return is_linear(layer)
    return kind != "vocabulary" or isinstance(layer, nn.Embedding)


def _within(module: nn.Module, modules: Sequence[str] | None) -> set[str]:
    """The names of the modules that may be split."""
    names = [name for name, _ in module.named_modules()]
    if modules is None:
        return set(names)
    found: set[str] = set()
    for pattern in modules:
        tops = [name for name in names if name == pattern or fnmatchcase(name, pattern)]
        if not tops:
            raise PlanError(
                f"TensorParallel(modules=...) names {pattern!r}, and {type(module).__name__} has no such module. It "
                f"has: {_some([name for name, _ in module.named_children()])}."
            )
        found.update(
            name for name in names if any(name == top or not top or name.startswith(f"{top}.") for top in tops)
        )
    return found


def _stands(attention: Attention, given: Mapping[str, Kind], within: set[str]) -> bool:
    """Whether an attention's heads are shared out: where nothing is said of it, or just that."""
    said = [given[name] for name in attention.layers if name in given]
    if not said:
        return within.issuperset(attention.layers)
    wanted = ["colwise"] * (len(attention.layers) - 1) + ["rowwise"]
    return [given.get(name) for name in attention.layers] == wanted


def _is_free(layers: Iterable[str], given: Mapping[str, Kind], within: set[str]) -> bool:
    return all(name in within and name not in given for name in layers)


def _without_large_heads(module: nn.Module, pairs: list[FeedForward]) -> list[FeedForward]:
    """A classifier's last layer with many classes is better split by its classes than by its features."""
    heads = find_heads(module, [], set())
    return [pair for pair in pairs if pair.rows not in heads]


def _vocabulary(module: nn.Module, taken: set[str], given: Mapping[str, Kind], within: set[str]) -> dict[str, Kind]:
    tables = [name for name, kind in given.items() if kind == "vocabulary"]
    found: dict[str, Kind] = {}
    if not tables:
        derived = find_embeddings(module)
        tables = [] if any(name in given or name not in within for name in derived) else derived
        found.update(dict.fromkeys(tables, "vocabulary"))
    heads = [name for name in find_heads(module, tables, taken) if name not in given and name in within]
    found.update(dict.fromkeys(heads, "logits"))
    return found


def _require_ties(module: nn.Module, kinds: Mapping[str, Kind]) -> None:
    """One weight in two layers is split in one way."""
    split = {name: kind for name, kind in kinds.items() if kind not in ("partial", "replicate")}
    ways: dict[int, tuple[str, Kind]] = {}
    for name, kind in split.items():
        ways[id(module.get_submodule(name)._parameters["weight"])] = name, kind
    by_rows = ("vocabulary", "logits", "colwise", "colwise_joined")
    for name, layer in module.named_modules():
        weight = layer._parameters.get("weight")
        other = ways.get(id(weight)) if weight is not None else None
        if other is None or name == other[0]:
            continue
        mine = split.get(name)
        if mine is None or (mine in by_rows) != (other[1] in by_rows):
            raise PlanError(
                f"{name} and {other[0]} share one weight, and the plan says {mine or 'replicate'!r} of the one and "
                f"{other[1]!r} of the other. Say the same of both in plan={{...}}: 'vocabulary' of an embedding goes "
                "with 'logits' of an output layer."
            )


def _some(names: Sequence[str], most: int = 12) -> str:
    return some_of(names, most) or "none"
