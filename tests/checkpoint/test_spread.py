"""Tensors of which each rank holds a part: each writes its own, nothing is gathered, and what is damaged is named."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor.debug import CommDebugMode

import paraflow as pf
from paraflow.checkpoint import format as disk
from paraflow.checkpoint.image import take_apart
from paraflow.checkpoint.ranks import Ranks
from paraflow.checkpoint.reading import read, take, verify
from paraflow.checkpoint.run import load, save, settle
from paraflow.checkpoint.stored import Stored
from paraflow.checkpoint.writer import Writer
from paraflow.mesh import Mesh
from paraflow.plan import Plan

WHOLE = {
    "even": torch.arange(24.0).view(4, 6),
    "uneven": torch.arange(9.0).view(3, 3) + 100,
    "one row": torch.arange(5.0).view(1, 5) + 200,
    "short": torch.arange(3.0) + 300,
    "half": torch.ones(6, 2, dtype=torch.bfloat16) * 7,
    "scalar": torch.tensor(3.5),
    "plain": torch.arange(4) + 400,
}
SPLIT_BY_COLUMNS = "even"


def mesh_of(**plan: int) -> Mesh:
    return Mesh(Plan(**plan), torch.device("cpu"))


def spread(mesh: Mesh, *dims: str) -> dict[str, Any]:
    """The state of this rank: all that has a shape is sharded over the last dimension of the mesh, and tied once."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    devices = mesh.device_mesh(*dims)

    def part(name: str, tensor: torch.Tensor) -> torch.Tensor:
        shard = Shard(1) if name == SPLIT_BY_COLUMNS else Shard(0)
        return distribute_tensor(tensor, devices, [Replicate()] * (len(dims) - 1) + [shard])

    model = {name: tensor if name in ("scalar", "plain") else part(name, tensor) for name, tensor in WHOLE.items()}
    return {"model": {**model, "tied": model["one row"]}, "step": 3}


def save_here(state: dict[str, Any], mesh: Mesh, folder: str, **options: Any) -> str | None:
    writer = Writer(**options)
    save(state, mesh, Path(folder), writer)
    return settle(writer, mesh)


def saved(folder: str, background: bool, **plan: int) -> dict[str, Any]:
    mesh = mesh_of(**plan)
    state = spread(mesh, *plan)
    before = mesh.store("checkpoint").num_keys()
    with CommDebugMode() as seen:
        assert save_here(state, mesh, folder, background=background) is None
    kinds = {str(kind): count for kind, count in seen.get_comm_counts().items()}
    return {"collectives": kinds, "keys": mesh.store("checkpoint").num_keys() - before}


LAYOUTS = [{"fsdp": 2}, {"fsdp": 4}, {"dp": 2, "fsdp": 2}]


@pytest.fixture(scope="module")
def shelf(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that tests read or copy: of two ranks ``a`` and a later ``b``, of four ``four``."""
    home = tmp_path_factory.mktemp("shelf")
    ranks(2, saved, str(home / "a"), False, fsdp=2)
    ranks(2, saved, str(home / "b"), False, fsdp=2)
    ranks(4, saved, str(home / "four"), False, fsdp=4)
    return home


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("plan", LAYOUTS, ids=str)
def test_each_rank_writes_its_own_part_and_one_process_reads_the_whole(
    ranks: Any, tmp_path: Path, plan: dict[str, int], background: bool
) -> None:
    size = 4 if plan != {"fsdp": 2} else 2
    ranks(size, saved, str(tmp_path / "a"), background, **plan)
    state = read(tmp_path / "a")
    assert state["model"].keys() == {*WHOLE, "tied"}
    for name, tensor in {**WHOLE, "tied": WHOLE["one row"]}.items():
        assert torch.equal(state["model"][name], tensor), name
        assert state["model"][name].dtype == tensor.dtype
    files = sorted(path.name for path in (tmp_path / "a").glob("tensors-*"))
    # Replicas write nothing, and nor does the fourth rank: six columns and three rows leave it none.
    assert files == [f"tensors-{rank:05d}.safetensors" for rank in range(min(3, plan["fsdp"]))]
    parts = {name: load_file(tmp_path / "a" / name) for name in files}
    names = [name for name, part in parts.items() if "model/plain" in part]
    assert names == ["tensors-00000.safetensors"]
    assert not any(tensor.numel() == 0 for part in parts.values() for tensor in part.values())
    assert not any("model/tied" in part for part in parts.values())
    rows = sum(part["model/uneven"].shape[0] for part in parts.values() if "model/uneven" in part)
    assert rows == len(WHOLE["uneven"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_nothing_large_is_gathered_and_nothing_is_left_in_the_store(ranks: Any, tmp_path: Path) -> None:
    """A tensor that is gathered is gathered by another collective than the random state and texts."""
    for said in ranks(4, saved, str(tmp_path / "a"), False, fsdp=4):
        assert said == {"collectives": {"c10d.allgather_": 8}, "keys": 0}


@pytest.mark.parametrize(
    "box",
    [
        ...,
        (slice(0, 2),),
        (slice(1, 4), slice(2, 5)),
        (slice(0, 4), slice(3, 3)),
        (slice(0, 0), slice(0, 6)),
        slice(2, 3),
    ],
    ids=str,
)
def test_a_box_is_read_from_the_pieces_it_lies_in(shelf: Path, box: Any) -> None:
    stored = take(shelf / "four")["model"]["even"]
    assert isinstance(stored, Stored)
    assert len(stored.pieces) == 3, "six columns over four ranks are 2, 2, 2 and none"
    assert torch.equal(stored[box], WHOLE["even"][box])


def test_what_is_on_disk_is_saved_again_as_it_is(shelf: Path, tmp_path: Path) -> None:
    shutil.copytree(shelf / "a", tmp_path / "a")
    state = take(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")  # it is open
    for background in (False, True):
        writer = Writer(background=background)
        writer.save(tmp_path / "b", take_apart(state))
        assert writer.settle() is None
        assert all(torch.equal(read(tmp_path / "b")["model"][name], tensor) for name, tensor in WHOLE.items())


def loads(folder: str, **plan: int) -> list[str]:
    """Names what of a checkpoint does not come back under a layout."""
    from paraflow.parts import part_for, whole

    mesh = mesh_of(**plan)
    own = spread(mesh, *plan)["model"]
    _, state = load(folder, {name: tuple(tensor.shape) for name, tensor in own.items()}, mesh)
    wrong = []
    for name, like in own.items():
        back = whole(part_for(state["model"][name], like))
        if not torch.equal(back, {**WHOLE, "tied": WHOLE["one row"]}[name]):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("plan", LAYOUTS[1:], ids=str)
def test_another_layout_reads_its_own_parts(ranks: Any, shelf: Path, plan: dict[str, int]) -> None:
    assert ranks(4, loads, str(shelf / "a"), **plan) == [[]] * 4


def broken(folder: str, rank: int, background: bool, what: str) -> tuple[str | None, list[str]]:
    """A save over another, in which one rank fails."""
    mesh = mesh_of(fsdp=2)
    state = spread(mesh, "fsdp")
    assert save_here(state, mesh, folder) is None
    if mesh.rank == rank:
        if what == "disk":

            def full(*_: Any) -> None:
                raise OSError(28, "No space left on device")

            disk.write_tensors = full  # type: ignore[assignment]
        else:
            state["model"]["huge"] = torch.ones(1).expand(2**48) if rank == 0 else as_huge(state["model"]["short"])
    try:
        failure = save_here({**state, "step": 4}, mesh, folder, background=background)
    finally:
        from paraflow.checkpoint.tensors import write_tensors

        disk.write_tensors = write_tensors
    return failure, sorted(os.listdir(Path(folder).parent))


def as_huge(like: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    held, shape = torch.ones(1).expand(2**9, 2**39), (2**10, 2**39)
    return DTensor.from_local(held, like.device_mesh, like.placements, run_check=False, shape=shape, stride=(2**39, 1))


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_makes_the_save_fail_for_all(
    ranks: Any, tmp_path: Path, rank: int, background: bool
) -> None:
    said = ranks(2, broken, str(tmp_path / "a"), rank, background, "disk")
    assert said[0] == said[1]
    failure, files = said[0]
    assert failure is not None
    assert failure.startswith(
        f"The checkpoint {str(tmp_path / 'a')!r} could not be written: No space left on device: it"
    )
    assert files == ["a"]
    assert read(tmp_path / "a")["step"] == 3, "what was there before is as it was"


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_that_runs_out_on_one_rank_makes_the_save_fail_for_all(ranks: Any, tmp_path: Path, rank: int) -> None:
    said = ranks(2, broken, str(tmp_path / "a"), rank, True, "memory")
    assert said[0] == said[1]
    assert "could not be written" in (said[0][0] or "")
    assert said[0][1] == ["a"]
    assert read(tmp_path / "a")["step"] == 3


def unsaveable(folder: str) -> str:
    mesh = mesh_of(fsdp=2)
    state = spread(mesh, "fsdp")
    if mesh.rank == 1:
        state["odd"] = object()
    with pytest.raises(pf.CheckpointError) as caught:
        save_here(state, mesh, folder)
    return str(caught.value)


def test_what_one_rank_cannot_take_apart_is_refused_by_all(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2, unsaveable, str(tmp_path / "a"))
    assert first == second
    assert "The state at 'odd' is a object" in first


def test_a_rank_that_is_never_heard_of_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    from paraflow.checkpoint import ranks as module

    monkeypatch.setattr(module, "PATIENCE", timedelta(milliseconds=50))
    among = Ranks(rank=0, others=(1,), store=dist.HashStore())
    with pytest.raises(pf.CheckpointError, match="nothing was heard of rank 1"):
        disk.write(tmp_path / "a", take_apart({"step": 1}), among)
    assert os.listdir(tmp_path) == []


def damaged(folder: str) -> str:
    mesh = mesh_of(fsdp=2)
    with pytest.raises(pf.CheckpointError) as caught:
        load(folder, {}, mesh)
    return str(caught.value)


def seal(folder: Path) -> None:
    sums = json.loads((folder / "checksums.json").read_text())
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in sums}
    (folder / "checksums.json").write_text(json.dumps(sums))


SECOND = "tensors-00001.safetensors"


def missing(folder: Path) -> None:
    (folder / SECOND).unlink()


def of_another_step(folder: Path) -> None:
    shutil.copy(folder.with_name("b") / SECOND, folder / SECOND)


def of_another_step_sealed(folder: Path) -> None:
    of_another_step(folder)
    seal(folder)


def of_another_shape(folder: Path) -> None:
    content = json.loads((folder / "state.json").read_text())
    piece = content["index"]["model/even"]["pieces"][1]
    piece["shape"], piece["offset"] = [2, 6], [2, 0]
    content["index"]["model/even"]["pieces"] = [{**piece, "offset": [0, 0]}, piece]
    (folder / "state.json").write_text(json.dumps(content))
    seal(folder)


def with_a_hole(folder: Path) -> None:
    content = json.loads((folder / "state.json").read_text())
    content["index"]["model/even"]["pieces"].pop()
    (folder / "state.json").write_text(json.dumps(content))
    seal(folder)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (missing, f"is no whole checkpoint: it has no {SECOND}"),
        (of_another_step, f"is damaged: {SECOND} (which says it is of another save) changed since it was written"),
        (of_another_step_sealed, f"is put together from two saves: {SECOND} is not of this one"),
        (of_another_shape, "is not what it says: 'model/even' in"),
        (with_a_hole, "the pieces of 'model/even' are not the whole"),
    ],
)
def test_shards_that_are_missing_or_of_two_steps_are_refused(
    ranks: Any, shelf: Path, tmp_path: Path, damage: Any, sentence: str
) -> None:
    for name in ("a", "b"):
        shutil.copytree(shelf / name, tmp_path / name)
    damage(tmp_path / "a")
    with pytest.raises(pf.CheckpointError) as caught:
        verify(tmp_path / "a")
    assert sentence in str(caught.value)
    for text in ranks(2, damaged, str(tmp_path / "a")):
        assert sentence in text
    verify(tmp_path / "b")
