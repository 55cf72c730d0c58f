"""A run ends with the step at which rank 0's clock has passed the limit; clocks here tick with the steps."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import paraflow as pf
from paraflow import trigger
from paraflow.callbacks import Checkpoint, LambdaCallback, time_limit
from paraflow.callbacks.time_limit import TimeLimit
from paraflow.interval import Interval
from tests.callbacks.runs import linear, samples


@contextmanager
def ticking(seconds_a_step: float) -> Iterator[LambdaCallback]:
    """Gives the modules that ask for the time a clock that a callback moves on by so much in each step."""
    clock = SimpleNamespace(now=100.0)
    fake = SimpleNamespace(monotonic=lambda: clock.now)
    former = trigger.time, time_limit.time
    trigger.time = time_limit.time = fake  # type: ignore[attr-defined]
    try:
        yield LambdaCallback(on_before_optimizer_step=lambda *_: setattr(clock, "now", clock.now + seconds_a_step))
    finally:
        trigger.time, time_limit.time = former  # type: ignore[attr-defined]


def fit(limit: TimeLimit, seconds_a_step: float = 1.0, resume: Any = None, **options: Any) -> pf.Trainer:
    extra = options.pop("callbacks", [])
    with ticking(seconds_a_step) as clock:
        trainer = pf.Trainer(max_epochs=20, callbacks=[clock, limit, *extra], **{"progress": False, **options})
        trainer.fit(linear(), samples(8), batch_size=4, resume=resume)
    return trainer


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("11h30min", 41400),
        ("1d 12h", 129600),
        ("90s", 90),
        ("1.5h", 5400),
        ("2 min 30 sec", 150),
        (" 1H5MIN ", 3900),
        (12, 12),
        (0.5, 0.5),
        (timedelta(hours=2, seconds=3), 7203),
        (Interval.parse("5min"), 300),
    ],
)
def test_limits_are_read(limit: Any, seconds: float) -> None:
    assert TimeLimit(limit).seconds == seconds


@pytest.mark.parametrize(
    "limit", ["500st", "10ep", "often", "", "h", "1h30", 0, -1, "0s", Interval(3, "st"), True, None]
)
def test_what_is_no_time_is_refused(limit: Any) -> None:
    with pytest.raises(ValueError, match=r"TimeLimit takes time, not .*max_steps"):
        TimeLimit(limit)


@pytest.mark.parametrize(("limit", "seconds_a_step", "stopped"), [("5s", 1.0, 5), ("5s", 2.0, 3), ("1min", 60.0, 1)])
def test_it_ends_with_the_step_at_which_time_is_over(limit: str, seconds_a_step: float, stopped: int) -> None:
    callback = TimeLimit(limit)
    trainer = fit(callback, seconds_a_step)
    assert trainer.step == callback.stopped_step == stopped


def test_a_run_that_is_done_before_is_left_alone() -> None:
    callback = TimeLimit("1h")
    assert fit(callback).step == 40
    assert callback.stopped_step is None


def test_what_ends_with_a_run_still_comes(tmp_path: Path) -> None:
    trainer = fit(TimeLimit("5s"), callbacks=[Checkpoint(tmp_path)])
    assert (tmp_path / "step-00000005").is_dir()
    assert len(trainer.history) == 3


@pytest.mark.parametrize(("over_resumes", "stopped"), [(False, 5 + 7), (True, 7)])
def test_earlier_parts_count_if_they_are_to(tmp_path: Path, over_resumes: bool, stopped: int) -> None:
    fit(TimeLimit("5s", over_resumes=over_resumes), callbacks=[Checkpoint(tmp_path)])
    again = TimeLimit("7s", over_resumes=over_resumes)
    assert fit(again, resume=tmp_path).step == stopped
    # Used anew, it has its whole time again.
    assert fit(again).step == 7


def test_a_run_without_time_left_trains_no_more(tmp_path: Path) -> None:
    fit(TimeLimit("5s", over_resumes=True), callbacks=[Checkpoint(tmp_path)])
    again = TimeLimit("5s", over_resumes=True)
    assert fit(again, resume=tmp_path).step == 5
    assert again.stopped_step == 5


def test_the_time_of_three_parts_adds_up(tmp_path: Path) -> None:
    for limit, step in (("2s", 2), ("5s", 5), ("9s", 9)):
        folder = {"resume": tmp_path} if step > 2 else {}
        callback = TimeLimit(limit, over_resumes=True)
        assert fit(callback, callbacks=[Checkpoint(tmp_path)], **folder).step == step
        assert callback.state_dict() == {"seconds": float(step)}


def test_one_line_says_why() -> None:
    out = io.StringIO()
    with ticking(60.0) as clock:
        trainer = pf.Trainer(max_epochs=20, callbacks=[clock, TimeLimit("1h30min")])
        trainer.console = Console(file=out, width=200)
        trainer.fit(linear(), samples(400), batch_size=4)
    assert "stopped at step 90: the time limit of 1:30:00 has passed" in out.getvalue().splitlines()


def _on_ranks() -> int:
    import os

    # Rank 1's clock goes ten times as fast; it does not matter.
    return fit(TimeLimit("6s"), 10.0 if os.environ["RANK"] == "1" else 1.0).step


def test_rank_0_decides(ranks: Any) -> None:
    assert ranks(2, _on_ranks) == [6, 6]
