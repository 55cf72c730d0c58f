"""Who writes what of a state: each part of each tensor is written once, by the first of the ranks that have it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from paraflow.checkpoint.image import NUMBERED, TENSOR, Image
from paraflow.errors import CheckpointError
from paraflow.mesh import Mesh
from paraflow.parts import Elsewhere
from paraflow.plan import DEGREES

_STAGES = "pp"


def claimed(image: Image, mesh: Mesh) -> Image:
    """Returns a rank's image of a state with what it writes of it, and on rank 0 with what other stages have in it.

    A part is written by the rank that comes first in every dimension of the mesh along which it is a copy. Whether it
    is one along the dimension of the stages is not known before they have told each other what they hold: a collective
    over them, where there are several.

    Args:
        image: What this rank has.
        mesh: The ranks.

    Raises:
        CheckpointError: What the stages have does not fit together; the ranks of a line of stages raise alike.
    """
    image = claimed_in_stage(image, mesh)
    if mesh.degree(_STAGES) == 1:
        return image
    stages = [json.loads(text) for text in mesh.gather_texts(_told(image), (_STAGES,))]
    before = {path for stage in stages[: mesh.coordinate(_STAGES)] for path in stage["held"]}
    mine = frozenset(name for name in image.mine or () if _path_of(image, name) not in before)
    held = {
        path: Elsewhere(tuple(shape), getattr(torch, dtype))
        for stage in stages
        for path, (dtype, shape) in stage["held"].items()
    }
    elsewhere = {path: whole for path, whole in {**image.elsewhere, **held}.items() if path not in image.tensors}
    return replace(image, plain=_joined([stage["plain"] for stage in stages]), elsewhere=elsewhere, mine=mine)


def claimed_in_stage(image: Image, mesh: Mesh) -> Image:
    """Returns a rank's image with what it writes of it, as far as can be said without asking the other stages."""
    return replace(image, mine=frozenset(name for name in image.tensors if _is_first(image, name, mesh)))


def _is_first(image: Image, name: str, mesh: Mesh) -> bool:
    """Whether no other rank of this one's stage has the same part and comes before it."""
    place = image.places.get(name)
    if place is not None and not place.writes:
        return False
    return all(
        mesh.coordinate(dim) == 0 or (place is not None and _are_the_first(dim, place.holders, mesh))
        for dim in DEGREES
        if dim != _STAGES and mesh.degree(dim) > 1
    )


def _are_the_first(dim: str, ranks: Sequence[int], mesh: Mesh) -> bool:
    """Whether some ranks are at different places along a dimension of the mesh, and no others come before them."""
    stride = math.prod(mesh.degree(inner) for inner in DEGREES[DEGREES.index(dim) + 1 :])
    places = {rank // stride % mesh.degree(dim) for rank in ranks}
    return len(places) > 1 and 0 in places


def _path_of(image: Image, name: str) -> str:
    place = image.places.get(name)
    return name if place is None else place.path


def _told(image: Image) -> str:
    """What a stage tells the others: its plain data, and the tensors of which it has something."""
    wholes = image.wholes()
    paths = {_path_of(image, name) for name in image.tensors}
    held = {path: (str(wholes[path].dtype).removeprefix("torch."), wholes[path].shape) for path in paths}
    return json.dumps({"plain": image.plain, "held": held})


def _joined(stages: Sequence[Any]) -> Any:
    """The plain data of a whole state, of which each stage has some."""
    plain = joined(stages)
    optimizers = [stage["optimizer"] for stage in stages if isinstance(stage, dict) and "optimizer" in stage]
    if len(optimizers) == len(stages):
        plain["optimizer"]["param_groups"] = _groups([optimizer["param_groups"] for optimizer in optimizers])
    return plain


def _groups(stages: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The optimizer's groups of the whole model: each has the parameters that its stages' have."""
    counts = [len(groups) for groups in stages]
    if len(set(counts)) > 1:
        raise CheckpointError(
            f"The optimizer has {' and '.join(map(str, counts))} groups on the stages of the pipeline, so that it is "
            "not known which belong together. Have configure_optimizers make the same groups on every rank, and leave "
            "those in that have no parameter there."
        )
    return [
        {**same[0], "params": list(dict.fromkeys(name for group in same for name in group["params"]))}
        for same in zip(*stages, strict=True)
    ]


def joined(values: Sequence[Any]) -> Any:
    """Returns what some have of one tree, in one: of what several have and is no branch, the first's.

    Args:
        values: Plain data, as an `Image` has it.

    Example:
        >>> joined([{"step": 3, "state": {"a": 1}}, {"step": 3, "state": {"b": 2}}])
        {'step': 3, 'state': {'a': 1, 'b': 2}}
    """
    first = values[0]
    if isinstance(first, dict) and TENSOR not in first:
        trees = [value for value in values if isinstance(value, dict)]
        if NUMBERED in first:
            numbered = [dict(map(tuple, tree.get(NUMBERED, []))) for tree in trees]
            return {NUMBERED: [[key, child] for key, child in joined(numbered).items()]}
        keys = dict.fromkeys(key for tree in trees for key in tree)
        return {key: joined([tree[key] for tree in trees if key in tree]) for key in keys}
    if isinstance(first, list) and all(isinstance(value, list) and len(value) == len(first) for value in values):
        return [joined(children) for children in zip(*values, strict=True)]
    return first
