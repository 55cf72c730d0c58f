"""The state of a run: everything that makes a resumed one equal to one that never stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paraflow.births import give_weights
from paraflow.checkpoint.folders import find, last_first
from paraflow.checkpoint.image import Image, take_apart
from paraflow.checkpoint.owners import claimed
from paraflow.checkpoint.pretrained import has_weights, open_weights
from paraflow.checkpoint.random import random_state
from paraflow.checkpoint.ranks import Ranks, new_identity
from paraflow.checkpoint.reading import ANOTHER, identity_of, take, verify
from paraflow.checkpoint.stored import Stored
from paraflow.checkpoint.tensors import size_of
from paraflow.checkpoint.writer import Writer
from paraflow.errors import CheckpointError, some_of
from paraflow.mesh import Mesh
from paraflow.outline import as_loaded, outline_of, tensors_of_the_whole
from paraflow.parts import part_for

Shapes = Mapping[str, tuple[int, ...]]


def save(state: dict[str, Any], mesh: Mesh, folder: Path, writer: Writer, replaces: Sequence[Path] = ()) -> None:
    """Saves a run's state, and every rank's random state with it: every rank calls it, and writes what is its own.

    Nothing is gathered: the first rank that has something writes it, and of what is spread over ranks each its part.

    Args:
        state: The state; what is spread over ranks is there as such tensors.
        mesh: The ranks.
        folder: Where it is to be.
        writer: Writes this rank's part.
        replaces: Checkpoints that are removed when this one is there.

    Raises:
        CheckpointError: The state holds what cannot be kept, or the save before failed; every rank raises.
    """
    image, error = Image(None, {}), writer.settle()
    whole = {**state, "random": random_state(mesh)}
    try:
        image = take_apart(whole)
    except CheckpointError as caught:
        error = error or caught
    try:
        image = claimed(image, mesh)
    except CheckpointError as caught:
        error = error or caught
    mine = {
        "failure": "" if error is None else str(error),
        "bytes": size_of(image.owned(mesh.rank)),
        "save": new_identity() if mesh.rank == 0 else "",
    }
    said = [json.loads(text) for text in mesh.gather_texts(json.dumps(mine))]
    if error is not None:
        raise error
    failures = [one["failure"] for one in said if one["failure"]]
    if failures:
        raise CheckpointError(failures[0])
    others = [rank for rank, one in enumerate(said) if rank and one["bytes"]]
    if mesh.rank and mesh.rank not in others:
        return
    identity = said[0]["save"]
    store = mesh.store(f"checkpoint/{identity}") if others else None
    writer.save(folder, image, () if mesh.rank else replaces, Ranks(identity, mesh.rank, others, store))


def settle(writer: Writer, mesh: Mesh) -> str | None:
    """Waits until what was saved is on the disk: every rank calls it.

    Returns:
        Why it is not there, the same on every rank, or None where it is.
    """
    failure = writer.settle()
    failures = mesh.gather_texts("" if failure is None else str(failure))
    return next((text for text in failures if text), None)


def save_now(state: dict[str, Any], mesh: Mesh, folder: Path) -> None:
    """Saves a run's state, and returns when it is on the disk: every rank calls it.

    Raises:
        CheckpointError: It could not be written; every rank raises.
    """
    writer = Writer()
    save(state, mesh, folder, writer)
    failure = settle(writer, mesh)
    if failure is not None:
        raise CheckpointError(failure)


def load(path: str | Path, shapes: Shapes, mesh: Mesh | None = None) -> tuple[Path, dict[str, Any]]:
    """Returns a checkpoint's folder and the run's state in it; its large tensors are left on disk (`Stored`).

    Args:
        path: A checkpoint, or a folder of them, of which the newest is taken.
        shapes: Those of the model's parameters and buffers, by name.
        mesh: The ranks, where all of them load: rank 0 finds the checkpoint for all, and they share its verification.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or it is of another model; every rank raises.
    """
    if mesh is None:
        folder = find(path)
        verify(folder)
        return folder, _taken(folder, shapes)
    folder = Path(_told(mesh, lambda: str(find(path))))
    damage = _damage(folder, mesh)
    if damage:
        raise CheckpointError(damage)
    return folder, _taken_by_all(folder, shapes, mesh)


def load_newest(folders: Sequence[Path], shapes: Shapes, mesh: Mesh) -> tuple[Path, dict[str, Any], list[str]] | None:
    """Returns the newest intact checkpoint in some folders, its state, and what is wrong with those that are newer.

    None where there is no checkpoint at all: every rank calls it.

    Raises:
        CheckpointError: There are checkpoints, and none is intact; or it is of another model. Every rank raises.
    """
    names = json.loads(_told(mesh, lambda: json.dumps([str(folder) for folder in last_first(folders)])))
    damages: list[str] = []
    for name in names:
        damage = _damage(Path(name), mesh)
        if not damage:
            return Path(name), _taken_by_all(Path(name), shapes, mesh), damages
        damages.append(damage.removesuffix(f" {ANOTHER}"))
    if damages:
        raise CheckpointError(f"None of the {len(damages)} checkpoints can be resumed from. {' '.join(damages)}")
    return None


def _damage(folder: Path, mesh: Mesh) -> str:
    """What is wrong with a checkpoint, or nothing: every rank looks at a share of it, and all have the same answer.

    Raises:
        CheckpointError: Another rank cannot read what rank 0 can; every rank raises.
    """
    identity, missing = "", ""
    try:
        verify(folder, mesh.rank, mesh.world_size)
        identity = identity_of(folder)
    except CheckpointError as error:
        missing = str(error)
    failures = mesh.gather_texts(missing)
    identities = mesh.gather_texts(identity)
    if failures[0]:
        return failures[0]
    for rank, text in enumerate(failures):
        if text or identities[rank] != identities[0]:
            # Is it the checkpoint, or this rank's view of it?
            _told(mesh, partial(_verified, folder, rank, mesh.world_size))
            raise _unreadable(rank, text or f"Its {str(folder)!r} is of another save.")
    return ""


def _verified(folder: Path, rank: int, ranks: int) -> str:
    verify(folder, rank, ranks)
    return ""


def _unreadable(rank: int, text: str) -> CheckpointError:
    return CheckpointError(f"Rank {rank} cannot read what rank 0 can; put checkpoints where all can. {text}")


def _told(mesh: Mesh, ask: Callable[[], str]) -> str:
    """What rank 0 found, on every rank; what it raised is raised on all."""
    answer, error = "", None
    if mesh.rank == 0:
        try:
            answer = "+" + ask()
        except (CheckpointError, OSError) as caught:
            error = caught if isinstance(caught, CheckpointError) else CheckpointError(f"It cannot be read: {caught}.")
            answer = f"-{error}"
    answer = mesh.gather_texts(answer)[0]
    if error is not None:
        raise error
    if answer.startswith("-"):
        raise CheckpointError(answer[1:])
    return answer[1:]


def _taken_by_all(folder: Path, shapes: Shapes, mesh: Mesh) -> dict[str, Any]:
    """Every rank's reading of a checkpoint; where one cannot, all raise."""
    state, failure = {}, ""
    try:
        state = _taken(folder, shapes)
    except CheckpointError as error:
        failure = str(error)
    failures = mesh.gather_texts(failure)
    for rank, text in enumerate(failures):
        if text and not failures[0]:
            raise _unreadable(rank, text)
        if text:
            raise CheckpointError(text)
    return state


def _taken(folder: Path, shapes: Shapes) -> dict[str, Any]:
    state = take(folder)
    model = state.get("model")
    if not isinstance(model, dict) or not all(isinstance(value, Stored) for value in model.values()):
        raise CheckpointError(f"The checkpoint {str(folder)!r} holds no model: tensors by name.")
    _require_shapes(shapes, shapes_of(model), folder)
    return state


def shapes_of(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of tensors by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def load_model(module: nn.Module, path: str | Path, *, best: bool = False) -> None:
    """Gives a module the weights of a checkpoint, whatever plan saved it; it needs no process group.

    Args:
        module: The module. Where it is spread over ranks, each reads its part; where it has no memory yet (torch's meta
            device), the weights are read when the Trainer lays it out.
        path: A checkpoint, or a folder of them, of which the newest is taken; or weights that others have saved: a
            ``.safetensors`` file, or a folder with ``model.safetensors`` or its index.
        best: Whether the one with the best monitored value is taken instead.

    Raises:
        CheckpointError: There is no checkpoint, or it is of another model.
    """
    if has_weights(path):
        give_weights(module, open_weights(path))
        return
    _, state = load(find(path, best=best), shapes_of(tensors_of_the_whole(module)))
    give(module, state["model"])


def give(module: nn.Module, tensors: Mapping[str, Any]) -> None:
    """Gives a module tensors by name, in memory or on disk: of each what this rank holds of it."""
    own = module.state_dict(keep_vars=True)
    if any(isinstance(tensor, torch.Tensor) and tensor.is_meta for tensor in own.values()):
        give_weights(module, tensors)
        return
    values = {
        name: part_for(value, own[name].detach()) if isinstance(own.get(name), torch.Tensor) else value
        for name, value in tensors.items()
        if name in own or outline_of(module) is None
    }
    module.load_state_dict(as_loaded(module, values))


def _require_shapes(mine: Shapes, theirs: Shapes, folder: Path) -> None:
    missing, unknown = sorted(mine.keys() - theirs.keys()), sorted(theirs.keys() - mine.keys())
    both = [name for name in mine if name in theirs]
    differing = [f"{name} {theirs[name]} for {mine[name]}" for name in both if mine[name] != theirs[name]]
    parts = [
        f"it lacks {some_of([f'{name} {mine[name]}' for name in missing])}" if missing else "",
        f"it has {some_of([f'{name} {theirs[name]}' for name in unknown])}" if unknown else "",
        f"of another shape: {some_of(differing)}" if differing else "",
    ]
    problems = "; ".join(part for part in parts if part)
    if problems:
        raise CheckpointError(f"The checkpoint {str(folder)!r} is of another model: {problems}.")
