"""Checkpoints that several ranks write: one killed, one alone, averages in the model, another number of ranks."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import paraflow as pf
from paraflow.checkpoint import find, load_model
from paraflow.checkpoint.image import Image, Place
from paraflow.checkpoint.ranks import Ranks
from paraflow.checkpoint.reading import read
from paraflow.checkpoint.writer import Writer
from paraflow.parts import whole
from tests.pain.test_checkpoints import kill_before_touch
from tests.pain.test_sharding import Constant
from tests.pool import Pool, RankError
from tests.trainer.test_memory import train


def image(step: int, rank: int) -> Image:
    """What one of two ranks has of a state: rows of a weight, and on rank 0 the rest."""
    part = torch.full((2 - rank, 4), float(step))
    place = Place("model/weight", (3, 4), torch.float32, (2 * rank, 0), writes=True, holders=(0, 1))
    plain = {"model": {"weight": {"__tensor__": "model/weight"}}, "step": step}
    return Image(plain, {"model/weight": part}, {"model/weight": place})


def save(folder: Path, step: int, rank: int, store: Path, replaces: list[Path]) -> None:
    among = Ranks(f"save-{step}", rank, (1,), dist.FileStore(str(store), 2))
    Writer().save(folder, image(step, rank), [] if rank else replaces, among)


def in_two_children(work: Callable[[int], None], victim: int) -> int:
    """Forks both ranks; returns how the victim ended, with which the other is killed, as a launcher would."""
    children = []
    for rank in (0, 1):
        child = os.fork()
        if child == 0:
            try:
                work(rank)
            except BaseException:
                os._exit(1)
            os._exit(0)
        children.append(child)
    status = os.waitstatus_to_exitcode(os.waitpid(children[victim], 0)[1])
    if status:
        os.kill(children[1 - victim], signal.SIGKILL)
    other = os.waitstatus_to_exitcode(os.waitpid(children[1 - victim], 0)[1])
    return status or other


def save_twice(folder: Path, new: str, victim: int, killed_at: int) -> int:
    """Saves a first checkpoint and then another, in which a rank is killed; returns how it ended."""
    assert in_two_children(lambda rank: save(folder / "step-1", 1, rank, folder.with_suffix(".a"), []), victim) == 0

    def over(rank: int) -> None:
        if rank == victim:
            kill_before_touch(killed_at, folder)
        replaced = [] if new == "step-1" else [folder / "step-1"]
        save(folder / new, 2, rank, folder.with_suffix(".b"), replaced)

    return in_two_children(over, victim)


@pytest.mark.parametrize(("victim", "new"), [(0, "step-2"), (1, "step-2"), (0, "step-1"), (1, "step-1")])
def test_a_rank_that_is_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, victim: int, new: str) -> None:
    """Lightning#688, #19970: a partial file after a kill; here of two ranks that write one checkpoint."""
    statuses, found = [-9], set()
    while statuses[-1] == -9:
        folder = tmp_path / f"run-{len(statuses)}"
        statuses.append(save_twice(folder, new, victim, len(statuses)))
        newest = read(find(folder))
        assert torch.equal(newest["model"]["weight"], torch.full((3, 4), float(newest["step"])))
        found.add(newest["step"])
    assert statuses[-1] == 0
    assert found == {1, 2}
    assert len(statuses) > (10 if victim == 0 else 3)
    # What was left behind is in nobody's way.
    first = tmp_path / "run-1"
    assert in_two_children(lambda rank: save(first / "step-3", 3, rank, tmp_path / "c", []), victim) == 0
    assert read(find(first))["step"] == 3


class ReadsOnMain(pf.Callback):
    """Rank 0 alone looks at the state, as something that writes weights of its own would."""

    def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        if pf.is_main():
            trainer.engine.model_state()
            trainer.engine.state_dict()
            trainer.engine.module.state_dict()
            [len(callback.state_dict()) for callback in trainer.callbacks if isinstance(callback, pf.callbacks.EMA)]


class SavesOnMain(pf.Callback):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_checkpoint(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        if pf.is_main() and trainer.step == 2:
            trainer.save(self.folder)


def on_main(folder: str, saves: bool) -> str | list[float]:
    model = Constant()
    alone = SavesOnMain(folder) if saves else ReadsOnMain()
    trainer = pf.Trainer(max_epochs=4, fsdp=2, debug=True, progress=False, callbacks=[pf.callbacks.EMA(0.5), alone])
    try:
        trainer.fit(model, torch.arange(4.0), batch_size=4)
    except pf.ParaflowError as error:
        return str(error)
    return whole(model.weight).tolist()


def test_state_is_no_collective_and_a_save_on_one_rank_is_found(ranks: Any, tmp_path: Path) -> None:
    """Lightning#3545, transformers#23111, #48569: taking the state was a collective, so one rank alone waited for ever.

    Nothing is gathered for it now. A save is a thing of all ranks; debug mode names the line where one is alone.
    """
    assert ranks(2, on_main, str(tmp_path), False) == [[-4.0] * 3] * 2
    said = ranks(2, on_main, str(tmp_path / "alone"), True)
    assert said[0] == said[1]
    assert "rank 0 is about to run" in said[0]
    assert "test_sharded_checkpoints.py" in said[0]


def average(folder: str, stop_at: int, resume: bool, **plan: Any) -> tuple[list[float], list[float], list[float]]:
    """One step an epoch, by which each entry goes down by 1; the weights, their averages and the validations."""
    model, ema = Constant(), pf.callbacks.EMA(0.5)
    refused: list[str] = []

    def within(trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        try:
            trainer.save(Path(folder) / "within")
        except pf.ParaflowError as error:
            refused.append(str(error))

    callbacks = [pf.callbacks.LambdaCallback(on_validation_end=within), ema, pf.callbacks.Checkpoint(folder)]
    trainer = pf.Trainer(max_epochs=stop_at, progress=False, callbacks=callbacks, **plan)
    history = trainer.fit(model, torch.arange(4.0), torch.arange(4.0), batch_size=4, resume=folder if resume else None)
    assert refused
    assert all("averaged weights are in the model" in text for text in refused)
    return whole(model.weight).tolist(), whole(ema.state_dict()["averages"]["weight"]).tolist(), history["val_loss"]


@pytest.mark.parametrize(("size", "plan"), [(2, {"fsdp": 2}), (4, {"dp": 2, "fsdp": 2, "zero": 1})])
def test_raw_weights_and_averages_are_saved_apart_and_taken_up_by_any_number_of_ranks(
    ranks: Any, tmp_path: Path, size: int, plan: dict[str, Any]
) -> None:
    """schnetpack PR#785, anemoi-core PR#1373, Lightning PR#20545: the averages were saved in the place of the weights.

    Lightning#16815, #14485, torchtitan#811, Megatron-LM#1517: what so many ranks have saved, another number loads.
    """
    folder = str(tmp_path / "run")
    for weight, averages, validations in ranks(size, average, folder, 3, False, **plan):
        assert (weight, averages) == ([-3.0] * 3, [-2.125] * 3)
        assert validations == pytest.approx([3 * -0.5, 3 * -1.25, 3 * -2.125])
    assert not (tmp_path / "run" / "within").exists()
    raw, averaged = Constant(), Constant()
    load_model(raw, folder)
    pf.callbacks.EMA.load(averaged, folder)
    assert (raw.weight.tolist(), averaged.weight.tolist()) == ([-3.0] * 3, [-2.125] * 3)
    for others, other_plan in ((1, {}), (3, {"fsdp": 3})):
        copy = tmp_path / str(others)
        shutil.copytree(folder, copy)
        for weight, averages, _ in ranks(others, average, str(copy), 3 + others, True, **other_plan):
            assert weight == [-3.0 - others] * 3
            expected = -2.125
            for step in range(4, 4 + others):
                expected = (expected - step) / 2
            assert averages == [expected] * 3


def run_out(folder: str) -> None:
    try:
        train(2, 1, "forward", fsdp=2, auto="O1", optimizer_implementation="default")
    except RuntimeError as error:
        (Path(folder) / str(pf.rank())).write_text("\n".join([str(error), *getattr(error, "__notes__", [])]))


@pytest.mark.slow
def test_memory_that_runs_out_on_one_rank_ends_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """composer PR#2117, #3510: one rank ran out of memory and the others waited for ever.

    Where parameters are sharded a step cannot be begun anew; the run ends on every rank, and says how not to run out.
    """
    own = Pool()  # a rank that is ended is gone
    with pytest.raises(RankError, match=r"^rank 0 raised:\nThe process died \(exit code 1\)\.$"):
        own(2, run_out, str(tmp_path))
    said = (tmp_path / "1").read_text()
    assert "Rank 1 ran out of memory on micro-batches of 5 samples. Write accumulate=2" in said
    assert "rank 1 failed, and this rank waits for it no longer" in capfd.readouterr().err
