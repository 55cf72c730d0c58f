from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import paraflow as pf
from paraflow.callbacks.profiler import Profiler
from tests.callbacks.runs import linear, samples
from tests.callbacks.traces import difference, left_by
from tests.pool import Pool


def run(profiler: Profiler, steps: int, *others: pf.Callback) -> pf.Trainer:
    trainer = pf.Trainer(max_steps=steps, callbacks=[*others, profiler], progress=False)
    trainer.fit(linear(), samples(8), batch_size=4)
    return trainer


def steps_in(trace: Path) -> list[int]:
    """The steps that a trace holds, counted from 0."""
    content = trace.read_bytes()
    text = gzip.decompress(content) if trace.suffix == ".gz" else content
    names = {event["name"] for event in json.loads(text)["traceEvents"] if "name" in event}
    return sorted(int(name.partition("#")[2]) for name in names if name.startswith("ProfilerStep#"))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_the_steps_that_were_asked_for_are_recorded(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path / "new", wait=1, warmup=1, active=3)
    run(profiler, 9)
    assert names_in(tmp_path / "new") == ["table.txt", "trace-rank0-step5.json"]
    assert steps_in(tmp_path / "new" / "trace-rank0-step5.json") == [2, 3, 4]
    assert profiler.traces == [tmp_path / "new" / "trace-rank0-step5.json"]


def rows_of(table: str) -> list[tuple[str, str, int]]:
    """The name, the share of its own time and the number of calls of each operation."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()]
    return [(row[0], row[1], int(row[-1])) for row in lines if len(row) > 4 and row[-1].isdigit()]


def test_the_table_has_the_costliest_first(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, wait=0, warmup=1, active=2)
    run(profiler, 4)
    table = (tmp_path / "table.txt").read_text()
    assert table == profiler.table
    rows = rows_of(table)
    calls = {name: count for name, _, count in rows}
    assert calls["aten::mse_loss"] == 2, "one in each of two steps"
    shares = [float(share.rstrip("%")) for _, share, _ in rows]
    assert shares == sorted(shares, reverse=True)


def test_there_may_be_several_recordings(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, wait=1, warmup=1, active=1, repeat=2, compressed=True)
    run(profiler, 9)
    assert names_in(tmp_path) == ["table.txt", "trace-rank0-step3.json.gz", "trace-rank0-step6.json.gz"]
    assert [steps_in(trace) for trace in profiler.traces] == [[2], [5]]
    assert {name: count for name, _, count in rows_of(profiler.table)}["aten::mse_loss"] == 2


@pytest.mark.parametrize(
    ("steps", "expected", "recorded"),
    [(5, "trace-rank0-step5.json", [2, 3, 4]), (4, "trace-rank0-step4.json", [2, 3]), (2, None, []), (1, None, [])],
)
def test_a_run_may_end_before_the_recording_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int, expected: str | None, recorded: list[int]
) -> None:
    profiler = Profiler(tmp_path)
    trainer = pf.Trainer(max_steps=steps, callbacks=[profiler])
    trainer.fit(linear(), samples(8), batch_size=4)
    assert names_in(tmp_path) == ([] if expected is None else ["table.txt", expected])
    out = capsys.readouterr().out
    if expected is None:
        assert "ended before the first step that was to be recorded" in out
    else:
        assert steps_in(tmp_path / expected) == recorded
        assert f"profiler: recorded until step {steps}" in out
    assert not torch.autograd.profiler._is_profiler_enabled


class FailsAt(pf.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        if trainer.step == self.step:
            raise RuntimeError("broken")


@pytest.mark.parametrize("step", [1, 2, 4])
def test_an_exception_ends_it_and_another_run_can_begin(tmp_path: Path, step: int) -> None:
    profiler = Profiler(tmp_path)
    with pytest.raises(RuntimeError, match="broken"):
        run(profiler, 9, FailsAt(step))
    assert not torch.autograd.profiler._is_profiler_enabled
    assert names_in(tmp_path) == []
    run(profiler, 9)
    assert names_in(tmp_path) == ["table.txt", "trace-rank0-step5.json"]


def test_when_it_is_done_the_profiler_is_off(tmp_path: Path) -> None:
    on: list[bool] = []

    class Watch(pf.Callback):
        def on_before_backward(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
            on.append(torch.autograd.profiler._is_profiler_enabled)

    run(Profiler(tmp_path, wait=1, warmup=1, active=2), 7, Watch())
    assert on == [False, False, True, True, False, False, False]


def _on_ranks(folder: str, ranks: tuple[int, ...] | None) -> tuple[int, str]:
    profiler = Profiler(folder, ranks=ranks)
    trainer = pf.Trainer(max_steps=7, callbacks=[profiler], progress=False)
    trainer.fit(linear(), samples(8), batch_size=4)
    return len(profiler.traces), profiler.table


@pytest.mark.parametrize(
    ("ranks_that_record", "expected"),
    [
        (None, ["table.txt", "trace-rank0-step5.json", "trace-rank1-step5.json"]),
        ((0,), ["table.txt", "trace-rank0-step5.json"]),
        ((1,), ["table.txt", "trace-rank1-step5.json"]),
        ((), []),
    ],
)
def test_each_rank_writes_its_trace(ranks: Pool, tmp_path: Path, ranks_that_record: Any, expected: list[str]) -> None:
    results = ranks(2, _on_ranks, str(tmp_path), ranks_that_record)
    assert names_in(tmp_path) == expected
    assert sum(count for count, _ in results) == len(expected[1:])
    assert sum(bool(table) for _, table in results) == bool(expected)
    for name in expected[1:]:
        assert steps_in(tmp_path / name) == [2, 3, 4]


def test_options_reach_the_profiler(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, active=1, record_shapes=True, profile_memory=True, with_stack=True)
    run(profiler, 4)
    assert "Input Shapes" in profiler.table
    assert "CPU Mem" in profiler.table
    assert '"Python parent id"' in profiler.traces[0].read_text()


def test_training_is_the_same(tmp_path: Path) -> None:
    assert difference(left_by([Profiler(tmp_path)]), left_by([])) == ""


@pytest.mark.parametrize("options", [{"wait": -1}, {"warmup": 0.5}, {"active": 0}, {"repeat": 0}])
def test_steps_that_are_none_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be a whole number of at least"):
        Profiler(tmp_path, **options)
