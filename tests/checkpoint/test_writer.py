"""The queue of saves and removals: its order, what fails in it, and what training may do meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import paraflow as pf
from paraflow.checkpoint import writer as module
from paraflow.checkpoint.image import Image, take_apart
from paraflow.checkpoint.reading import read
from paraflow.checkpoint.writer import Writer

both = pytest.mark.parametrize("background", [False, True])


class Gate:
    """Stands in a writer's way to the disk, and notes what it does there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, opened: bool = False) -> None:
        self.done: list[tuple[str, str]] = []
        self.began, self.opened = threading.Event(), threading.Event()
        if opened:
            self.opened.set()
        for name in ("write", "remove"):
            monkeypatch.setattr(module, name, self._noting(name, getattr(module, name)))

    def _noting(self, name: str, act: Callable[..., None]) -> Callable[..., None]:
        def noted(folder: Path, *rest: Any) -> None:
            self.began.set()
            assert self.opened.wait(20), "nobody opened the gate"
            self.done.append((name, folder.name))
            act(folder, *rest)

        return noted


def image(number: float, size: int = 1000) -> Image:
    return take_apart({"number": number, "tensor": torch.full((size,), number)})


def test_in_the_background_training_goes_on_before_the_checkpoint_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, writer = Gate(monkeypatch), Writer(background=True)
    writer.save(tmp_path / "a", image(1.0))
    assert gate.began.wait(20)
    assert not (tmp_path / "a").exists()
    gate.opened.set()
    assert writer.settle() is None
    assert read(tmp_path / "a")["number"] == 1.0


def test_in_the_foreground_it_is_there_when_save_returns(tmp_path: Path) -> None:
    Writer().save(tmp_path / "a", image(1.0))
    assert read(tmp_path / "a")["number"] == 1.0


@both
def test_a_new_one_is_whole_before_old_ones_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    gate, writer = Gate(monkeypatch, opened=True), Writer(background=background)
    for name, replaces in (("a", []), ("b", []), ("c", ["a", "b"]), ("d", ["c"])):
        writer.save(tmp_path / name, image(1.0), [tmp_path / old for old in replaces])
    assert writer.settle() is None
    order = ["write a", "write b", "write c", "remove a", "remove b", "write d", "remove c"]
    assert [" ".join(step) for step in gate.done] == order
    assert os.listdir(tmp_path) == ["d"]


@both
def test_a_failure_keeps_the_old_ones_and_is_told_once(tmp_path: Path, background: bool) -> None:
    writer = Writer(background=background)
    writer.save(tmp_path / "a", image(1.0))
    (tmp_path / "file").write_text("no folder")
    writer.save(tmp_path / "file" / "b", image(2.0), [tmp_path / "a"])
    failure = writer.settle()
    assert isinstance(failure, pf.CheckpointError)
    assert str(tmp_path / "file" / "b") in str(failure)
    assert writer.settle() is None
    assert read(tmp_path / "a")["number"] == 1.0
    writer.save(tmp_path / "c", image(3.0), [tmp_path / "a"])
    assert writer.settle() is None
    assert sorted(os.listdir(tmp_path)) == ["c", "file"]


@both
def test_a_failure_that_nobody_asked_for_is_raised_by_the_next_save(tmp_path: Path, background: bool) -> None:
    writer = Writer(background=background)
    (tmp_path / "file").write_text("no folder")
    writer.save(tmp_path / "file" / "b", image(2.0))
    with pytest.raises(pf.CheckpointError, match="could not be written"):
        writer.save(tmp_path / "c", image(3.0))
    assert not (tmp_path / "c").exists()
    writer.save(tmp_path / "c", image(3.0))
    assert writer.settle() is None


@both
def test_an_error_that_is_not_the_disks_is_a_failure_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("in a thread nobody hears it")

    monkeypatch.setattr(module, "write", broken)
    writer = Writer(background=background)
    writer.save(tmp_path / "a", image(1.0))
    failure = writer.settle()
    assert isinstance(failure, pf.CheckpointError)
    assert "nobody hears it" in str(failure)
    assert isinstance(failure.__cause__, ZeroDivisionError)


def test_memory_that_runs_out_is_a_failure_too(tmp_path: Path) -> None:
    """Raised by `save` it would be on this rank alone, and the others would wait for it."""
    writer = Writer(background=True)
    writer.save(tmp_path / "a", take_apart({"huge": torch.ones(1).expand(2**48)}))
    assert "could not be written" in str(writer.settle())
    writer.save(tmp_path / "a", image(1.0))
    assert writer.settle() is None
    assert os.listdir(tmp_path) == ["a"]


def test_what_changes_after_save_is_not_in_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, writer = Gate(monkeypatch), Writer(background=True)
    weights = {
        "dense": torch.arange(6.0).view(2, 3),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "scalar": torch.tensor(7),
        "flags": torch.tensor([True, False, True]),
        "nothing": torch.empty(0, 4),
    }
    before = {name: tensor.clone() for name, tensor in weights.items()}
    writer.save(tmp_path / "a", take_apart(weights))
    assert gate.began.wait(20)
    for tensor in weights.values():
        tensor.zero_()
    gate.opened.set()
    assert writer.settle() is None
    back = read(tmp_path / "a")
    for name, tensor in before.items():
        assert torch.equal(back[name], tensor), name
        assert back[name].dtype == tensor.dtype


def test_the_next_save_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must, for both use the same memory."""
    gate, writer = Gate(monkeypatch), Writer(background=True)
    writer.save(tmp_path / "a", image(1.0))
    returned = threading.Event()

    def second() -> None:
        writer.save(tmp_path / "b", image(2.0), [tmp_path / "nothing"])
        returned.set()

    thread = threading.Thread(target=second)
    thread.start()
    assert gate.began.wait(20)
    assert not returned.wait(0.1)
    gate.opened.set()
    thread.join(20)
    assert writer.settle() is None
    assert [read(tmp_path / name)["tensor"][0].item() for name in ("a", "b")] == [1.0, 2.0]


def test_memory_for_copies_is_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[int] = []
    write = module.write

    def noted(folder: Path, state: Image, ranks: Any) -> None:
        places.append(state.tensors["tensor"].data_ptr())
        write(folder, state, ranks)

    monkeypatch.setattr(module, "write", noted)
    writer = Writer(background=True)
    for number in (1.0, 2.0, 3.0):
        writer.save(tmp_path / str(number), image(number))
    writer.save(tmp_path / "less", image(4.0, size=10))
    assert writer.settle() is None
    assert len(set(places)) == 1
    writer.save(tmp_path / "more", image(5.0, size=100_000))
    assert writer.settle() is None
    assert torch.equal(read(tmp_path / "more")["tensor"], torch.full((100_000,), 5.0))


def test_memory_can_be_taken_ahead_of_the_first_save(tmp_path: Path) -> None:
    writer, asked = Writer(background=True), []

    def size() -> int:
        asked.append(1)
        return 4 * 1000

    for _ in range(3):
        writer.reserve(size)
    assert len(asked) == 1
    assert writer.settle() is None
    assert writer._staging is not None, "it is there when the writer has settled"
    taken = writer._staging.data_ptr()
    writer.save(tmp_path / "a", image(1.0))
    assert writer.settle() is None
    assert writer._staging.data_ptr() == taken
    Writer().reserve(size)
    assert len(asked) == 1, "in the foreground nothing is copied"
