from __future__ import annotations

import math
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import paraflow as pf
from paraflow.callbacks import Checkpoint, LambdaCallback
from paraflow.errors import ParaflowError
from paraflow.loggers.jsonlines import JSONLinesLogger
from tests.callbacks.runs import Scripted, linear, samples
from tests.loggers.reading import read_lines


def _fit(folder: Path, epochs: int, resume: Path | None = None, **options: Any) -> list[dict[str, Any]]:
    loggers = [JSONLinesLogger(folder / "logs" / "log.jsonl", every=1)]
    saving = Checkpoint(folder / "saved", "1ep", keep=9)
    trainer = pf.Trainer(max_epochs=epochs, callbacks=[saving], loggers=loggers, progress=False, **options)
    trainer.fit(linear(), samples(8), samples(4), batch_size=4, resume=resume)
    return read_lines(folder / "logs" / "log.jsonl")


def _without_time(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != "time"} for line in lines]


def test_lines_of_a_run(tmp_path: Path) -> None:
    lines = _fit(tmp_path, 2, clip_norm=float("inf"), seed=3)
    assert [(line["event"], line["step"], line["epoch"]) for line in lines] == [
        ("start", 0, 1),
        ("step", 1, 1),
        ("step", 2, 1),
        ("epoch", 2, 1),
        ("step", 3, 2),
        ("step", 4, 2),
        ("epoch", 4, 2),
        ("end", 4, 2),
    ]
    assert lines[0]["plan"]["clip_norm"] == "Infinity"
    assert lines[0]["seed"] == 3
    assert set(lines[0]["versions"]) == {"paraflow", "torch", "python"}
    assert lines[0]["versions"]["paraflow"] == pf.__version__
    assert set(lines[1]) == {"event", "step", "epoch", "time", "loss", "lr", "grad_norm"}
    assert lines[3]["epoch_loss"] == pytest.approx((lines[1]["loss"] + lines[2]["loss"]) / 2)
    assert lines[-1]["status"] == "finished"
    times = [line["time"] for line in lines]
    assert times == sorted(times)


def test_what_json_has_no_number_for_is_a_string_that_float_reads(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    trainer = pf.Trainer(max_epochs=3, loggers=[JSONLinesLogger(path, every=None)], progress=False)
    trainer.fit(Scripted([math.nan, math.inf, -math.inf]), samples(4), samples(4), batch_size=4)
    said = [line["val_loss"] for line in read_lines(path) if line["event"] == "epoch"]  # read_lines refuses bare NaN
    assert said == ["NaN", "Infinity", "-Infinity"]
    assert math.isnan(float(said[0]))
    assert float(said[2]) == -math.inf


def test_a_failed_run_names_the_error(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    fail = LambdaCallback(on_epoch_end=lambda trainer, logs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pf.Trainer(callbacks=[fail], loggers=[JSONLinesLogger(path)], progress=False).fit(linear(), samples(8))
    last = read_lines(path)[-1]
    assert (last["status"], last["error"]) == ("failed", "ZeroDivisionError: division by zero")


def test_a_resumed_run_drops_later_lines_and_a_torn_one(tmp_path: Path) -> None:
    whole = _without_time(_fit(tmp_path, 3))
    path = tmp_path / "logs" / "log.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b'"epoch": 3') + 5])  # the process died in the middle of a line
    with pytest.raises(ValueError, match=r"Expecting|Unterminated|delimiter"):
        read_lines(path)
    lines = _without_time(_fit(tmp_path, 3, resume=tmp_path / "saved" / "step-00000002"))
    start = next(number for number, line in enumerate(lines) if line["event"] == "start" and number)
    assert (lines[start]["step"], lines[start]["plan"]) == (2, whole[0]["plan"])
    assert lines[:start] + lines[start + 1 :] == whole


def test_a_torn_line_of_the_step_that_is_resumed_is_dropped(tmp_path: Path) -> None:
    _fit(tmp_path, 1)
    path = tmp_path / "logs" / "log.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    lines = _fit(tmp_path, 2, resume=tmp_path / "saved")
    assert [line["event"] for line in lines] == ["start", "step", "step", "epoch", "start"] + ["step"] * 2 + [
        "epoch",
        "end",
    ]


def test_a_new_run_begins_the_file_anew_with_the_same_logger_too(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    trainer = pf.Trainer(max_epochs=1, loggers=[JSONLinesLogger(path, every=1)], progress=False)
    for _ in range(2):
        trainer.fit(linear(), samples(8), batch_size=4)
        assert [line["event"] for line in read_lines(path)] == ["start", "step", "step", "epoch", "end"]


def test_a_file_that_is_no_log_is_not_touched_by_a_resumed_run(tmp_path: Path) -> None:
    _fit(tmp_path, 1)
    path = tmp_path / "logs" / "log.jsonl"
    path.write_text('{"event": "start", "step": 0}\nmy notes\n')
    with pytest.raises(ParaflowError, match=r"log.jsonl' is not a log to go on with: line 2 is no JSON object"):
        _fit(tmp_path, 2, resume=tmp_path / "saved")
    assert path.read_text() == '{"event": "start", "step": 0}\nmy notes\n'


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    trainer = pf.Trainer(loggers=[JSONLinesLogger(tmp_path / "file" / "log.jsonl")], progress=False)
    with pytest.raises(ParaflowError, match=r"JSONLinesLogger cannot write '.*log.jsonl': (Not|File)"):
        trainer.fit(linear(), samples(8))


def test_a_full_disk_ends_the_run_with_a_sentence_and_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    trainer = pf.Trainer(max_epochs=20, loggers=[JSONLinesLogger(path, every=1)], progress=False)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # no file may grow beyond: as a full disk
    try:
        with (
            pytest.warns(UserWarning, match="could not close its log"),
            pytest.raises(ParaflowError, match=r"JSONLinesLogger cannot write '.*log.jsonl': there is room for"),
        ):
            trainer.fit(linear(), samples(8), batch_size=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    lines = read_lines(path)
    assert lines[-1]["step"] in (trainer.step, trainer.step - 1)
    assert len(lines) > 5


_KILLED = """
import os, signal, sys
import paraflow as pf
from paraflow.callbacks import LambdaCallback
from paraflow.loggers.jsonlines import JSONLinesLogger
from tests.callbacks.runs import linear, samples
kill = LambdaCallback(on_step_begin=lambda trainer, logs: trainer.step == 3 and os.kill(os.getpid(), signal.SIGKILL))
trainer = pf.Trainer(max_epochs=9, callbacks=[kill], loggers=[JSONLinesLogger(sys.argv[1], every=1)], progress=False)
trainer.fit(linear(), samples(8), batch_size=4)
"""


def test_a_line_is_safe_when_its_event_is_over(tmp_path: Path) -> None:
    path, root = tmp_path / "log.jsonl", Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(path)], cwd=tmp_path, env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [(line["event"], line["step"]) for line in read_lines(path)] == [
        ("start", 0),
        ("step", 1),
        ("step", 2),
        ("epoch", 2),
        ("step", 3),
    ]
