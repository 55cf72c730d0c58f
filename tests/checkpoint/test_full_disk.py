"""A disk that is really full: a tmpfs of a few megabytes."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paraflow as pf
from paraflow.callbacks import Checkpoint
from paraflow.checkpoint import find, load_model, saved_in

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")]
MIB = 2**20
X = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MiB, which holds two of the checkpoints below and not three."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def net() -> nn.Module:
    """Weights of 2 MiB, and SGD without a state."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(64, 4096, bias=False), nn.Linear(4096, 64, bias=False))
    return pf.configure(body, optimizer="sgd", lr=1e-3, loss="mse")


class Disk(pf.Callback):
    """Fills the disk after some steps and frees it after others."""

    def __init__(self, place: Path, fill: tuple[int, ...], free: tuple[int, ...] = ()) -> None:
        self.place, self.fill, self.free = place, fill, free
        self.weights: dict[int, torch.Tensor] = {}

    def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.weights[trainer.step] = trainer.engine.module[0].weight.detach().clone()
        if trainer.step in (*self.free, *self.fill):
            for thread in threading.enumerate():
                if thread.name == "paraflow-checkpoint":  # what it still writes and removes takes and makes room
                    thread.join()
        if trainer.step in self.free and trainer.is_main:
            (self.place / "filling").unlink()
        if trainer.step in self.fill and trainer.is_main:
            free = os.statvfs(self.place).f_bavail * os.statvfs(self.place).f_frsize
            (self.place / "filling").write_bytes(b"x" * (free - MIB))


def names(folder: Path) -> list[str]:
    return [path.name for path in saved_in(folder)]


@pytest.mark.parametrize("background", [False, True])
def test_training_goes_on_and_saves_again_when_there_is_room(disk: Path, background: bool) -> None:
    filling = Disk(disk, fill=(3,), free=(6,))
    runs = disk / "runs"
    saving = Checkpoint(runs, 1, on_error="continue", background=background)
    loaded: dict[int, str] = {}

    class Look(pf.Callback):
        def on_step_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
            if trainer.step in (4, 5):
                loaded[trainer.step] = find(runs).name

    trainer = pf.Trainer(max_steps=8, progress=False, callbacks=[filling, Look(), saving])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(net(), (X, X), batch_size=4)
    told = [str(warning.message) for warning in caught if "could not be written" in str(warning.message)]
    assert trainer.step == 8
    assert len(told) == 3, "steps 3, 4 and 5"
    for step, text in zip((3, 4, 5), told, strict=True):
        assert f"{str(runs / f'step-{step:08d}')!r}" in text
        needed, free = (int(number.replace(",", "")) for number in re.findall(r"([\d,]+) (?:bytes|left)", text))
        assert 2 * MIB < needed < 2.1 * MIB
        assert free < 2 * MIB
        assert text.endswith("What was there before is as it was. Training goes on.")
    assert loaded == {4: "step-00000002", 5: "step-00000002"}
    assert names(runs) == ["step-00000008"]
    assert sorted(os.listdir(runs)) == ["step-00000008"]
    model = net()
    load_model(model, runs)
    assert torch.equal(model[0].weight, filling.weights[8])


@pytest.mark.parametrize("background", [False, True])
def test_the_previous_checkpoint_can_be_resumed(disk: Path, tmp_path: Path, background: bool) -> None:
    runs, saving = disk / "runs", Checkpoint(disk / "runs", 1, background=background)
    with pytest.raises(pf.CheckpointError, match=r"step-00000003.*No space left on device: it needs [\d,]+ bytes"):
        pf.Trainer(max_steps=8, progress=False, callbacks=[Disk(disk, (3,)), saving]).fit(net(), (X, X), batch_size=4)
    assert names(runs) == ["step-00000002"]
    (disk / "filling").unlink()
    rest, whole = net(), net()
    pf.Trainer(max_steps=8, progress=False, callbacks=[Checkpoint(runs, 1)]).fit(
        rest, (X, X), batch_size=4, resume="auto"
    )
    pf.Trainer(max_steps=8, progress=False).fit(whole, (X, X), batch_size=4)
    assert torch.equal(rest[0].weight, whole[0].weight)


def test_a_best_that_a_failed_save_pushed_out_is_the_best_again(disk: Path) -> None:
    filling = Disk(disk, fill=(3,), free=(6,))
    saving = Checkpoint(disk / "runs", 1, on_error="continue", monitor="val_loss", mode="max")
    values = [1.0, 2.0, 9.0, 8.0, 7.0, 1.5]

    class Scripted(pf.Model):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()
            self.configure(optimizer="sgd", lr=1e-3)

        def training_step(self, batch: Any) -> torch.Tensor:
            return nn.functional.mse_loss(self.body(batch[0]), batch[1])

        def validation_step(self, batch: Any) -> torch.Tensor:
            return torch.tensor(values.pop(0))

        def __getitem__(self, index: int) -> nn.Module:
            return self.body[index]

    trainer = pf.Trainer(max_steps=6, val_every=1, progress=False, callbacks=[filling, saving])
    with pytest.warns(UserWarning, match="could not be written"):
        trainer.fit(Scripted(), (X, X), (X[:4], X[:4]), batch_size=4)
    assert (saving.best, saving.best_step) == (2.0, 2)
    assert names(disk / "runs") == ["step-00000002", "step-00000006"]


def on_a_rank(place: str) -> tuple[str, int]:
    disk = Path(place)
    saving = Checkpoint(disk / "runs", 1)
    trainer = pf.Trainer(max_steps=8, progress=False, callbacks=[Disk(disk, (3,)), saving])
    with pytest.raises(pf.CheckpointError) as caught:
        trainer.fit(net(), (X, X), batch_size=4)
    return str(caught.value), trainer.step


def test_every_rank_raises_the_same(ranks: Any, disk: Path) -> None:
    (first, step), second = ranks(2, on_a_rank, str(disk))
    assert second == (first, step)
    assert step == 3
    assert str(disk / "runs" / "step-00000003") in first
    assert "No space left on device: it needs" in first


def goes_on(place: str) -> tuple[int, int]:
    disk = Path(place)
    saving = Checkpoint(disk / "runs", 1, on_error="continue", background=True)
    trainer = pf.Trainer(max_steps=8, progress=False, callbacks=[Disk(disk, (3,), (6,)), saving])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(net(), (X, X), batch_size=4)
    return trainer.step, sum("could not be written" in str(warning.message) for warning in caught)


def test_every_rank_goes_on_and_one_says_why(ranks: Any, disk: Path) -> None:
    assert ranks(2, goes_on, str(disk)) == [(8, 3), (8, 0)]
    assert names(disk / "runs") == ["step-00000008"]
