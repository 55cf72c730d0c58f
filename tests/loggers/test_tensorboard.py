from __future__ import annotations

import resource
import threading
from pathlib import Path

import pytest

import paraflow as pf
from paraflow.callbacks import LambdaCallback
from paraflow.errors import ParaflowError
from paraflow.loggers.tensorboard import TensorBoardLogger
from tests.callbacks.runs import linear, samples
from tests.loggers.reading import read_tensorboard

pytest.importorskip("tensorboard")


def test_numbers_are_in_the_file_when_their_event_is_over(tmp_path: Path) -> None:
    seen = []
    look = LambdaCallback(
        on_step_begin=lambda trainer, logs: seen.append(sorted(read_tensorboard(tmp_path).series.get("loss", {})))
    )
    trainer = pf.Trainer(
        max_steps=3, callbacks=[look], loggers=[TensorBoardLogger(tmp_path / "board", every=1)], progress=False
    )
    trainer.fit(linear(), samples(12), batch_size=4)
    assert seen == [[], [1], [1, 2]]


def test_a_new_run_hides_the_one_before_it(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path / "board", every=1)
    for steps in (4, 2):
        pf.Trainer(max_steps=steps, loggers=[logger], progress=False).fit(linear(), samples(16), batch_size=4)
        assert sorted(read_tensorboard(tmp_path).series["loss"]) == list(range(1, steps + 1))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    trainer = pf.Trainer(loggers=[TensorBoardLogger(tmp_path / "file")], progress=False)
    with pytest.raises(ParaflowError, match=r"TensorBoardLogger cannot write '.*file': File exists"):
        trainer.fit(linear(), samples(8))


def test_a_full_disk_ends_the_run_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)  # tensorboard's own thread tells it too
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    trainer = pf.Trainer(max_epochs=50, loggers=[TensorBoardLogger(tmp_path / "board", every=1)], progress=False)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))  # no file may grow beyond: as a full disk
    try:
        with (
            pytest.warns(UserWarning, match="could not close its log"),
            pytest.raises(ParaflowError, match=r"TensorBoardLogger cannot write '.*board': File too large"),
        ):
            trainer.fit(linear(), samples(8), batch_size=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    logged = sorted(read_tensorboard(tmp_path).series["loss"])
    assert logged == list(range(1, len(logged) + 1))
    assert len(logged) > 3
