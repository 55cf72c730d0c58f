from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

import paraflow as pf
from paraflow.callbacks import Checkpoint, LambdaCallback
from paraflow.errors import ParaflowError
from paraflow.loggers import CSVLogger
from tests.callbacks.runs import Scripted, linear, samples


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_are_the_steps_and_the_epochs(tmp_path: Path) -> None:
    path, losses = tmp_path / "new" / "log.csv", {}
    note = LambdaCallback(on_step_end=lambda trainer, logs: losses.update({trainer.step: logs["loss"]}))
    trainer = pf.Trainer(
        max_epochs=2, callbacks=[note], loggers=[CSVLogger(path, every=2)], progress=False, clip_norm=float("inf")
    )
    history = trainer.fit(linear(), samples(9), samples(5), batch_size=3)
    rows = rows_of(path)
    assert [(row["step"], row["epoch"]) for row in rows] == [("2", "1"), ("3", "1"), ("4", "2"), ("6", "2"), ("6", "2")]
    steps, epochs = [row for row in rows if row["loss"]], [row for row in rows if row["epoch_loss"]]
    assert [int(row["step"]) for row in steps] == [2, 4, 6]
    assert [float(row["loss"]) for row in steps] == [losses[2], losses[4], losses[6]]
    assert all(float(row["lr"]) == 0.1 and float(row["grad_norm"]) > 0 and not row["val_loss"] for row in steps)
    assert [float(row["epoch_loss"]) for row in epochs] == history["loss"]
    assert [float(row["val_loss"]) for row in epochs] == history["val_loss"]
    assert history["loss"][0] == pytest.approx(sum(losses[step] for step in (1, 2, 3)) / 3)


def test_epochs_only(tmp_path: Path) -> None:
    trainer = pf.Trainer(max_epochs=3, loggers=[CSVLogger(tmp_path / "log.csv", every=None)], progress=False)
    history = trainer.fit(linear(), samples(8), batch_size=4)
    assert [float(row["epoch_loss"]) for row in rows_of(tmp_path / "log.csv")] == history["loss"]


def test_columns_are_added_as_numbers_appear(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    trainer = pf.Trainer(max_epochs=4, loggers=[CSVLogger(path, every=1)], progress=False, val_every="2ep")
    trainer.fit(Scripted([5.0, 7.0]), samples(8), samples(4), batch_size=4)
    rows = rows_of(path)
    assert len(rows) == 8 + 4
    assert [row["val_loss"] for row in rows if row["epoch_loss"]] == ["", "5.0", "", "7.0"]
    assert all(float(row["loss"]) > 0 for row in rows if not row["epoch_loss"])


def test_a_row_is_on_the_disk_when_its_event_is_over(tmp_path: Path) -> None:
    path, seen = tmp_path / "log.csv", []
    later = LambdaCallback(on_step_end=lambda trainer, logs: seen.append(int(rows_of(path)[-1]["step"])))
    # Loggers come after callbacks: at step n the rows up to n - 1 are there.
    trainer = pf.Trainer(max_steps=3, callbacks=[CSVLogger(path, every=1), later], progress=False)
    trainer.fit(linear(), samples(8), batch_size=2)
    assert seen == [1, 2, 3]


def _run(folder: Path, epochs: int, resume: Path | None = None, **options: Any) -> list[dict[str, str]]:
    callbacks = [Checkpoint(folder / "saved", "1ep", keep=9)]
    trainer = pf.Trainer(
        max_epochs=epochs, callbacks=callbacks, loggers=[CSVLogger(folder / "log.csv", 1)], progress=False, **options
    )
    trainer.fit(linear(), samples(8), samples(4), batch_size=4, resume=resume)
    return rows_of(folder / "log.csv")


def test_a_resumed_run_drops_the_rows_it_runs_again(tmp_path: Path) -> None:
    whole = _run(tmp_path, 4)
    assert [row["step"] for row in whole] == ["1", "2", "2", "3", "4", "4", "5", "6", "6", "7", "8", "8"]
    assert _run(tmp_path, 4, resume=tmp_path / "saved" / "step-00000004") == whole


def test_a_run_that_was_cut_off_goes_on_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = _run(tmp_path / "whole", 3)
    _run(tmp_path / "parts", 1)
    assert _run(tmp_path / "parts", 3, resume=tmp_path / "parts" / "saved") == whole


def test_a_new_run_begins_the_file_anew(tmp_path: Path) -> None:
    _run(tmp_path, 3)
    assert [row["step"] for row in _run(tmp_path, 1)] == ["1", "2", "2"]


def test_validation_within_an_epoch_has_a_row_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    trainer = pf.Trainer(max_epochs=1, loggers=[CSVLogger(path, every=None)], progress=False, val_every=1)
    trainer.fit(Scripted([5.0, 7.0, 6.0]), samples(12), samples(4), batch_size=4)
    assert [(row["step"], row["val_loss"], bool(row["epoch_loss"])) for row in rows_of(path)] == [
        ("1", "5.0", False),
        ("2", "7.0", False),
        ("3", "6.0", True),
    ]


def test_a_row_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    whole = _run(tmp_path, 2)
    path = tmp_path / "log.csv"
    content = path.read_bytes()
    path.write_bytes(content[: content.rindex(b"4,2") + 1])  # a torn "4,2,..." that reads as step 4
    assert _run(tmp_path, 2, resume=tmp_path / "saved" / "step-00000002") == whole
    path.write_bytes(content[:-4])
    rows = _run(tmp_path, 2, resume=tmp_path / "saved" / "step-00000004")
    assert [row["step"] for row in rows] == ["1", "2", "2", "3", "4"]


def test_a_file_that_is_no_log_is_not_touched_by_a_resumed_run(tmp_path: Path) -> None:
    _run(tmp_path, 1)
    (tmp_path / "log.csv").write_text("name,age\nme,7\n")
    with pytest.raises(ParaflowError, match=r"log.csv' is not a log to go on with: it has a row without a step"):
        _run(tmp_path, 2, resume=tmp_path / "saved")
    assert (tmp_path / "log.csv").read_text() == "name,age\nme,7\n"


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "log.csv").mkdir()
    with pytest.raises(ParaflowError, match=r"CSVLogger cannot write '.*log.csv': Is a directory"):
        pf.Trainer(loggers=[CSVLogger(tmp_path / "log.csv")], progress=False).fit(linear(), samples(8))
    assert list(tmp_path.iterdir()) == [tmp_path / "log.csv"]
