"""Runs that end before their time: an exception, a stall, a signal. How soon, how, and can they go on?"""

from __future__ import annotations

import os
import re
import signal
import time
from functools import partial
from typing import Any

from fault_jobs import SCRIPT, Bench, Job, Row, between, two_at_a_time

_END_SECONDS = 10.0
_STALL = {"stall_timeout": "4s"}
_LONGER = 20.0  # than stall_timeout a stall may take, on a machine that is busy
_STEP = 30  # at which something happens: in the second epoch, where no checkpoint is due


def _lines_after(output: str, last: str) -> int | None:
    """How many lines come after one, or None where it is not there."""
    # Torch's own hook puts the rank before each line.
    lines = [line.removeprefix("[rank1]:").strip() for line in output.rstrip().splitlines()]
    return lines[::-1].index(last) if last in lines else None


def exceptions(bench: Bench) -> list[Row]:
    """Raises on one rank, under both launchers; one run at a time, since the time counts."""
    cases = {
        "exception on rank 1": {"what": "fail", "rank": 1, "at": _STEP},
        "exception on rank 0": {"what": "fail", "rank": 0, "at": _STEP},
        "exception in a loader's worker": {"what": "sample", "at": 200},
    }
    rows = [_exception(bench, title, options, "paraflow") for title, options in cases.items()]
    return [*rows, _exception(bench, "exception on rank 1, under torchrun", cases["exception on rank 1"], "torchrun")]


def _exception(bench: Bench, title: str, options: dict[str, Any], launcher: str) -> Row:
    name = re.sub("[^a-z0-9]+", "-", title)
    last = "ValueError: the broken sample" if options["what"] == "sample" else "ValueError: the broken rank"
    with bench.trial(name) as folder:
        job = Job(folder, 2, options, launcher)
        code = job.wait()
        notes = job.trace("fault") or job.trace("step")[-1:]
        seconds = time.time() - notes[-1]["time"] if notes else 0.0
        after, left = _lines_after(job.output, last), job.orphans()
        ends = code not in (None, 0) and seconds <= _END_SECONDS and not left
        # Torch's launcher prints a report of its own at the end, whatever is run.
        right = ends and (after == 0 if launcher == "paraflow" else after is not None)
        if not right:
            bench.wrong(name, f"exit status {code} after {seconds:.1f} s, {after} lines after, {left} ranks live", job)
    place = "its traceback last" if after == 0 else f"its traceback, {after} lines follow"
    what = "no traceback of it" if after is None else place
    return Row(title, f"exit status {code}; {what}", f"{seconds:.1f} to the end", right)


def stalls(bench: Bench) -> list[Row]:
    """Has rank 1 sleep in a callback, and be stopped by SIGSTOP."""
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "# the stalled line" in text)
    asleep = f"rank 1: after step {_STEP}, at {SCRIPT.name}:{line} in sleep, is in no collective"
    return [
        _stall(bench, "rank 1 stalls, stall_timeout 4 s", "sleep", asleep, "its line named"),
        _stall(bench, "rank 1 is stopped (SIGSTOP)", "freeze", "rank 1: does not answer", "said not to answer"),
        _stall(bench, "rank 1 stalls, under torchrun", "sleep", "StallError: There was no", "told why", "torchrun"),
    ]


def _stall(bench: Bench, title: str, what: str, expected: str, words: str, launcher: str = "paraflow") -> Row:
    name = f"stall-{what}-{launcher}"
    with bench.trial(name) as folder:
        job = Job(folder, 2, {"what": what, "rank": 1, "at": _STEP, "trainer": _STALL}, launcher)
        code = job.wait()
        notes, output = job.trace("fault"), job.output
        seconds = time.time() - notes[-1]["time"] if notes else 0.0
        named, told, left = "rank 0 waits for rank 1." in output, expected in output, job.orphans()
        right = code not in (None, 0) and named and told and not left and seconds <= 4 + _LONGER
        if not right:
            bench.wrong(name, f"exit status {code} after {seconds:.1f} s, {named=}, {told=}, {left} ranks live", job)
    result = f"exit status {code}; rank 1 {'' if named else 'not '}named; {'' if told else 'not '}{words}"
    return Row(title, result, f"{seconds:.1f} to the end", right)


def signals(bench: Bench) -> list[Row]:
    """Sends SIGTERM and SIGINT to one rank of two, to their launcher, and to a single process."""
    rows = []
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        tries = [partial(_signal, bench, number, whom, status) for whom in ("one process", "one rank", "launcher")]
        done: list[tuple[bool, float]] = two_at_a_time(tries)
        result = (
            f"{sum(right for right, _ in done)} of {len(done)}: exit status {status}, saved at the step it stopped "
            "after, resumed bit-equal"
        )
        seconds = f"{between([seconds for _, seconds in done])} to the end"
        title = f"{number.name} to one process, one rank of two, the launcher"
        rows.append(Row(title, result, seconds, all(right for right, _ in done)))
    return rows


def _signal(bench: Bench, number: signal.Signals, whom: str, status: int) -> tuple[bool, float]:
    name = f"{number.name}-{whom}".replace(" ", "-")
    chance, ranks = bench.chance(name), 1 if whom == "one process" else 2
    untouched, right = bench.untouched(ranks, {}), False
    with bench.trial(name) as folder:
        job = Job(folder, ranks, {})
        job.comes_to("step", chance.randint(1, 200))
        sent = time.time()
        os.kill(job.pid(chance.randrange(2)) if whom == "one rank" else job.process.pid, number)
        code = job.wait()
        seconds = time.time() - sent
        said = re.search(r"the run stops after step (\d+)", job.output)
        step = int(said[1]) if said else -1
        saved = (folder / "checkpoints" / f"step-{step:08d}" / "state.json").exists()
        if code != status or not saved or job.orphans():
            bench.wrong(name, f"exit status {code}, step {step} {'' if saved else 'not '}saved", job)
        else:
            resumed = Job(folder, ranks, {})
            code = resumed.wait()
            began = resumed.trace("train")
            if code != 0 or not began or began[0]["step"] != step:
                bench.wrong(name, f"resumed, it ended with {code}, or did not begin at step {step}", resumed)
            else:
                right = bench.compare(name, folder, untouched, resumed)
    bench.say(f"{name}: {'right' if right else 'WRONG'}")
    return right, seconds
