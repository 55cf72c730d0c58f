"""Checkpoints under bad luck: a kill at any moment, a full disk, a disk that is slower than training."""

from __future__ import annotations

import ast
import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import paraflow as pf
from paraflow.checkpoint import find, load_model, saved_in
from paraflow.checkpoint import format as files
from paraflow.checkpoint import writer as writing
from paraflow.checkpoint.image import take_apart
from paraflow.checkpoint.reading import read
from paraflow.checkpoint.writer import Writer
from tests.callbacks.runs import Scripted, linear, samples


def in_a_child(work: Callable[[], None]) -> int:
    """Runs a function in a fork of this process; returns the signal or status that it ended with."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_before_touch(number: int, folder: Path) -> None:
    """Kills this process with -9 when it is about to touch a folder's files for the n-th time."""
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and str(folder) in str(arguments[0]):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def state(step: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((3,), float(step))}, "counters": {"step": step}}


@pytest.mark.parametrize("same_name", [False, True])
def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path, same_name: bool) -> None:
    """One is there, the next is written and the first removed: before each touch of the disk the process is killed."""
    new = "step-00000001" if same_name else "step-00000002"
    kills, statuses, found = 0, [-9], set()
    while statuses[-1] == -9:
        kills += 1
        folder = tmp_path / str(kills)
        Writer().save(folder / "step-00000001", take_apart(state(1)))

        def save(folder: Path = folder, number: int = kills) -> None:
            kill_before_touch(number, folder)
            replaced = [] if same_name else [folder / "step-00000001"]
            Writer().save(folder / new, take_apart(state(2)), replaced)

        statuses.append(in_a_child(save))
        newest = read(find(folder))
        step = newest["counters"]["step"]
        assert torch.equal(newest["model"]["weight"], torch.full((3,), float(step)))
        assert all(read(part) for part in saved_in(folder))
        found.add(step)
        Writer().save(folder / "step-00000003", take_apart(state(3)))  # what was left behind is in nobody's way
        assert read(find(folder))["counters"]["step"] == 3
    assert statuses[-1] == 0
    assert kills > 10
    assert found == {1, 2}


def full_at(save: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when a checkpoint's tensors are written for the n-th time."""
    write, seen = files.write_tensors, 0

    def full(*arguments: Any) -> str:
        nonlocal seen
        seen += 1
        if seen == save:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)

    monkeypatch.setattr(files, "write_tensors", full)


def steps_in(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in saved_in(folder)]


def train(folder: Path) -> None:
    """Two steps an epoch, saved after each epoch; the validations give 1, 2, 3, 4."""
    checkpoint = pf.callbacks.Checkpoint(folder, monitor="val_loss")
    trainer = pf.Trainer(max_epochs=4, progress=False, callbacks=[checkpoint])
    trainer.fit(Scripted([1.0, 2.0, 3.0, 4.0]), samples(8), samples(4), batch_size=4)


def fill_up(folder: str) -> tuple[str, list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        if pf.is_main():
            full_at(3, patch)
        try:
            train(Path(folder))
        except pf.CheckpointError as error:
            return str(error), steps_in(Path(folder))
    return "nothing", []


def test_on_a_full_disk_all_ranks_stop_and_the_checkpoints_before_are_there(ranks: Any, tmp_path: Path) -> None:
    for world_size in (1, 2):
        folder = tmp_path / str(world_size)
        for said, steps in ranks(world_size, fill_up, str(folder)):
            assert f"'{folder}/step-00000006' could not be written: No space left on device: it needs " in said
            assert steps == [2, 4]  # the best and the last: nothing was removed for one that never came
        assert read(find(folder))["counters"]["step"] == 4


def test_in_the_background_a_checkpoint_is_removed_only_when_the_next_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is slower than training, so saves and removals of several steps meet."""
    write, remove, order = files.write, files.remove, []

    def slowly(folder: Path, image: Any, ranks: Any) -> None:
        time.sleep(0.03)
        write(folder, image, ranks)
        order.append(("saved", int(folder.name[5:])))

    def told(folder: Path) -> None:
        order.append(("removed", int(folder.name[5:])))
        remove(folder)

    monkeypatch.setattr(writing, "write", slowly)
    monkeypatch.setattr(writing, "remove", told)
    model = linear()
    weights: dict[int, torch.Tensor] = {}
    note = pf.callbacks.LambdaCallback(
        on_checkpoint=lambda trainer, logs: weights.update({trainer.step: model.state_dict()["weight"].clone()})
    )
    saving = pf.callbacks.Checkpoint(tmp_path, 1, keep=2, background=True)
    pf.Trainer(max_steps=5, progress=False, callbacks=[note, saving]).fit(model, samples(20), batch_size=4)
    saved = [("saved", 1), ("saved", 2), ("saved", 3), ("removed", 1), ("saved", 4), ("removed", 2), ("saved", 5)]
    assert order == [*saved, ("removed", 3)]
    assert steps_in(tmp_path) == [4, 5]
    for step in (4, 5):  # what a step had, though the next was made while it was written
        loaded = linear()
        load_model(loaded, tmp_path / f"step-{step:08d}")
        assert torch.equal(loaded.state_dict()["weight"], weights[step])


def test_reading_a_checkpoint_knows_no_way_to_run_code() -> None:
    """Formats that can run code are not imported where checkpoints are read, nor is anything imported by a name."""
    package = Path(files.__file__).parent
    imported = {
        name
        for file in package.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
    }
    assert "safetensors" in imported
    assert not imported & {
        "pickle",
        "cloudpickle",
        "importlib",
        "marshal",
        "shelve",
        "runpy",
        "builtins",
        "load_pickle",
    }
    called = [
        text
        for file in package.glob("*.py")
        for text in ("torch.load", "eval(", "__import__")
        if text in file.read_text()
    ]
    assert called == []
