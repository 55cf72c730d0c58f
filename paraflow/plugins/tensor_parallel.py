"""Tensor parallelism: the ranks of a group compute single layers together, each with a part of their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import nn

from paraflow.births import require_same_births
from paraflow.collectives import add_up, broadcast
from paraflow.errors import ModelError, ParaflowError, PlanError
from paraflow.launch.environment import local_world_size
from paraflow.optim.kinds import is_elementwise
from paraflow.parts import is_spread, local
from paraflow.plan import DATA_DEGREES, Plan
from paraflow.plugins.base import Part, Phase, Plugin
from paraflow.rules import Rule

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from paraflow.engine import Engine
    from paraflow.mesh import Mesh
    from paraflow.optim.update import Held
    from paraflow.tensor_parallel.applying import Applied
    from paraflow.tensor_parallel.layout import Layout

_MARK = "_paraflow_tensor_parallel"
_BUCKET_BYTES = 25 * 2**20
_KNOWS_NO_PARTS = {
    "Adafactor": "divides by norms of whole rows and columns",
    "Muon": "multiplies whole matrices",
    "LBFGS": "takes all parameters as one vector",
}

RULES = (
    Rule(
        "tensor-parallel-without-degree",
        lambda f: f.plan.tp == 1 and f.world_size > 1,
        "The plugin TensorParallel was given, and the plan's tp is 1, by which nothing would be split.",
        "Write TensorParallel({f.world_size}) or tp={f.world_size}, or leave the plugin out.",
    ),
    Rule(
        "tensor-parallel-compile",
        lambda f: f.plan.compile and f.plan.tp > 1,
        "compile=True was asked for beside tp={f.plan.tp}, and the collectives inside of layers are not compiled yet.",
        "Leave one of them out.",
    ),
    Rule(
        "tensor-parallel-backward-apply",
        lambda f: f.plan.apply_groups == "backward" and f.plan.tp > 1,
        "apply_groups='backward' updates a parameter in backward, and under tp={f.plan.tp} some gradients are added up "
        "over the ranks after it.",
        "Write apply_groups=4, say.",
    ),
)


def _own_rules(shares: bool) -> Iterator[Rule]:
    """The rows for arguments that the plan's fields do not say."""
    if shares:
        yield Rule(
            "sequence-parallel-pipeline",
            lambda f: f.plan.pp > 1,
            "sequence_parallel=True shares the sequence out within a run of blocks, and pp={f.plan.pp} cuts such runs.",
            "Leave sequence_parallel out, or write pp=1.",
        )


class TensorParallel(Plugin):
    """Splits layers over the ranks of a group (Shoeybi et al. 2019); names, classes and code of the model stay.

    Attention is split by heads, feed-forward layers by inner features, the vocabulary by tokens.
    What is split is what ``plan`` says, then what the model says itself (``_tp_plan`` of transformers), then what is
    derived from its shapes. All else is whole on every rank.

    Args:
        degree: The ranks that share a layer; None is what the plan says.
        plan: What becomes of layers, by name or pattern, such as ``{"blocks.*.mlp.up": "colwise"}``; one of
            ``"colwise"``, ``"colwise_joined"``, ``"rowwise"``, ``"vocabulary"``, ``"logits"``, ``"partial"`` and
            ``"replicate"``.
        modules: Names or patterns of the modules inside which layers are split; None is everywhere.
        sequence_parallel: Whether ranks hold shares of the sequence between split layers, instead of the same
            activations (Korthikanti et al. 2022). The sequence must be a multiple of the degree.

    Raises:
        PlanError: An argument is not of its kind.
    """

    name = "tensor_parallel"
    phase = Phase.SPLIT
    rules: ClassVar[tuple[Rule, ...]] = RULES
    provides = ("tp",)

    def __init__(
        self,
        degree: int | None = None,
        *,
        plan: Mapping[str, str] | None = None,
        modules: Sequence[str] | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        if plan is not None and not isinstance(plan, Mapping):
            raise PlanError(f"plan of TensorParallel maps names or patterns to what becomes of layers, not {plan!r}.")
        if isinstance(modules, str) or (modules is not None and not all(isinstance(m, str) for m in modules)):
            raise PlanError(f"modules of TensorParallel is a list of names or patterns, not {modules!r}.")
        self.degree = degree
        self._plan = plan
        self._modules = modules
        self._shares = sequence_parallel
        self.rules = (*RULES, *_own_rules(sequence_parallel))  # type: ignore[misc]  # what this one was given
        self._applied: Applied | None = None
        self._sums: list[nn.Parameter] = []
        self._described = ""

    @property
    def fields(self) -> Mapping[str, Any]:
        """The degree, where it was said."""
        return {} if self.degree is None else {"tp": self.degree}

    def transform(self, module: nn.Module, engine: Engine) -> nn.Module:
        """Splits the layers; every rank of a group starts from its first rank's parameters."""
        if engine.plan.tp == 1:
            return module
        from paraflow.tensor_parallel.outside import Guarded

        model, mesh = engine.module, engine.mesh
        asked = _Asked(mesh.device_mesh("tp"), dict(self._plan or {}), tuple(self._modules or ()), self._shares)
        earlier: _Earlier | None = model.__dict__.get(_MARK)
        if earlier is not None:
            _require_same(model, earlier.asked, asked)
            _give_whole_values(model, mesh)
            self._applied, self._described = earlier.applied, earlier.described
        else:
            self._applied, self._described = self._split(model, mesh)
            model.__dict__[_MARK] = _Earlier(asked, self._applied, self._described)
        return Guarded(module)

    def _split(self, model: nn.Module, mesh: Mesh) -> tuple[Applied, str]:
        """Splits a model that is whole; returns what was done, and that in words."""
        from paraflow.tensor_parallel.applying import split
        from paraflow.tensor_parallel.layout import layout_of
        from paraflow.tensor_parallel.region import Region

        layout = _alike_refused(mesh, lambda: layout_of(model, self._plan, self._modules))
        if not _on_any_stage(mesh, bool(layout)):
            raise _nothing_to_split(model, self._modules)
        require_same_births(model, mesh, (*DATA_DEGREES, "tp"))
        _give_whole_values(model, mesh)
        region = Region(mesh.device_mesh("tp"))
        total = sum(parameter.numel() for parameter in model.parameters())
        applied = _alike_refused(mesh, lambda: split(model, layout, region, mesh.device, shares=self._shares))
        return applied, _in_words(model, layout, applied, region.degree, total)

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, engine: Engine) -> torch.optim.Optimizer:
        """Gives an optimizer that treats elements alike plain parts; another one keeps tensors that know the whole."""
        if self._applied is None:
            return optimizer
        self._sums = [
            parameter
            for name, parameter in engine.module.named_parameters(remove_duplicate=False)
            if name in self._applied.partial and parameter.requires_grad
        ]
        self._sums = list({id(parameter): parameter for parameter in self._sums}.values())
        warning = warning_across_hosts(engine.plan.tp)
        if warning is not None:
            engine.say(warning)
        if engine.plan.fsdp > 1 or engine.plan.offloads_parameters:  # which gives out the parts of parts
            return optimizer
        name = type(optimizer).__name__
        if is_elementwise(optimizer):
            engine.update.hold(_part_of)
        elif name in _KNOWS_NO_PARTS:
            raise ModelError(
                f"{name} {_KNOWS_NO_PARTS[name]}, and under tp={engine.plan.tp} a rank has a part of some. Use an "
                "optimizer that treats elements one by one, such as adamw, or dp= in place of tp=."
            )
        return optimizer

    def micro_batch(self, index: int, count: int, part: Part, last: bool) -> AbstractContextManager[Any]:
        """Has random numbers go back to the common stream, should a step be broken off."""
        return nullcontext() if self._applied is None else self._around(self._applied)

    @contextmanager
    def _around(self, applied: Applied) -> Iterator[None]:
        try:
            yield
        finally:
            applied.stream.reset()

    def reduce_gradients(self, engine: Engine) -> None:
        """Adds up, over the group, the gradients of which each rank has a summand."""
        if self._sums:
            gradients = [local(p.grad) for p in self._sums if p.grad is not None]
            add_up(gradients, engine.mesh.group("tp"), _BUCKET_BYTES)

    def completes_gradient(self, name: str, parameter: nn.Parameter) -> bool:
        """Of the same parameters."""
        return any(parameter is one for one in self._sums)

    def partitioned_over(self, name: str, parameter: nn.Parameter) -> Sequence[str] | None:
        """The parameters of split layers are."""
        mesh = getattr(parameter, "device_mesh", None)
        return ("tp",) if mesh is not None and "tp" in (mesh.mesh_dim_names or ()) else ()

    def describe(self) -> str:
        """Returns one line for the printed plan."""
        return f"tensor parallel over {self.degree or 'all'} ranks" + (
            f": {self._described}" if self._described else ""
        )


@dataclass(frozen=True)
class _Asked:
    """How a model was to be split: what cannot be changed once it is."""

    device_mesh: DeviceMesh
    plan: Mapping[str, str]
    modules: tuple[str, ...]
    shares: bool

    def __str__(self) -> str:
        given = {"plan": self.plan, "modules": self.modules, "sequence_parallel": self.shares}
        said = "".join(f", {name}={value!r}" for name, value in given.items() if value)
        return f"TensorParallel({self.device_mesh.size()}{said})"


@dataclass(frozen=True)
class _Earlier:
    """What an earlier run has done to a model; a later one goes on with it."""

    asked: _Asked
    applied: Applied
    described: str

    def __deepcopy__(self, memo: object) -> _Earlier:
        return self  # a copy of a model is split over the same ranks

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _require_same(model: nn.Module, earlier: _Asked, asked: _Asked) -> None:
    if earlier != asked:
        raise ModelError(
            f"{type(model).__name__} has been split by an earlier Trainer, with {earlier}, and this one asks for "
            f"{asked}. Use the same plan, or make the model anew and load its state."
        )


def _give_whole_values(model: nn.Module, mesh: Mesh) -> None:
    """Gives every rank of a group its first rank's values of what each of them has whole."""
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    broadcast([tensor for tensor in tensors if not is_spread(tensor)], mesh.group("tp"), _BUCKET_BYTES)


_Made = TypeVar("_Made")


def _alike_refused(mesh: Mesh, make: Callable[[], _Made]) -> _Made:
    """Makes what looks at the layers of this rank's stages; what is refused on one stage is refused on all."""
    if mesh.degree("pp") == 1:
        return make()
    made: list[_Made] = []
    refused: ParaflowError | None = None
    try:
        made.append(make())
    except ParaflowError as error:
        refused = error
    said = [text for text in mesh.gather_texts("" if refused is None else str(refused)) if text]
    if refused is not None:
        raise refused
    if said:
        raise PlanError(said[0])
    return made[0]


def _on_any_stage(mesh: Mesh, found: bool) -> bool:
    return found if mesh.degree("pp") == 1 else mesh.any(found)


def _nothing_to_split(model: nn.Module, modules: Sequence[str] | None) -> PlanError:
    where = f" inside {', '.join(modules)}" if modules else ""
    return PlanError(
        f"tp= was asked for, and nothing in {type(model).__name__}{where} is known to be splittable. Looked for: a "
        "plan of the model's own (_tp_plan); attention with query, key, value and output layers (q_proj, k_proj, "
        "v_proj, o_proj and the like); pairs of linear layers from hidden to inner features and back (up/down, "
        "fc1/fc2, c_fc/c_proj, or two in a Sequential with an activation between); embeddings and output layers of "
        "1,000 rows or more. Say which layers are split: plugins=[pf.plugins.TensorParallel(2, plan={'mlp.first': "
        "'colwise', 'mlp.second': 'rowwise'})]."
    )


def _in_words(model: nn.Module, layout: Layout, applied: Applied, degree: int, total: int) -> str:
    parts = sum(parameter.numel() for parameter in model.parameters() if is_spread(parameter))
    words = [f"{len(layout.names)} layers split, with {parts / max(1, total):.0%} of the parameters"]
    if layout.attentions:
        words.append(f"{len(layout.attentions)} attentions by heads")
    if applied.uneven:
        words.append(
            f"{len(applied.uneven)} of them unevenly, with weights whole on every rank ({degree} does not divide the "
            "heads)"
        )
    if any(isinstance(inner, nn.MultiheadAttention) for inner in model.modules()):
        words.append("torch's MultiheadAttention stays whole")
    if applied.runs:
        words.append("sequence shared out between them")
    return ", ".join(words)


def warning_across_hosts(degree: int) -> str | None:
    """Returns what is to be said where the ranks of a group are on several hosts, or None."""
    here = local_world_size()
    if here % degree == 0:
        return None
    return (
        f"warning: tp={degree} reaches across hosts ({here} ranks on this one). Every layer waits for the network; "
        f"a tp that divides {here} stays inside a host."
    )


def _part_of(held: Held) -> torch.Tensor:
    if not is_spread(held.tensor):
        return held.tensor
    return nn.Parameter(local(held.tensor).detach(), requires_grad=held.tensor.requires_grad)


def from_plan(plan: Plan, options: Mapping[str, Any]) -> TensorParallel | None:
    """Returns the plugin that a plan asks for, or None."""
    return TensorParallel(plan.tp, **options) if plan.tp > 1 else None
