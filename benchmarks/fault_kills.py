"""kill -9 at random moments: is the resumed run the one that nobody killed?"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from fault_jobs import LARGE, SMALL, Bench, Job, Row, Untouched, between, two_at_a_time

# Large and small checkpoints, written in the loop and beside it: each kind is killed as often as the others.
KINDS = [{**size, "background": background} for size in (SMALL, LARGE) for background in (False, True)]
_START_SECONDS = 2.0  # from fit to the first step, about: the second kill may come then, too


@dataclass
class Tally:
    """What came of a try.

    Attributes:
        equal: Whether the run ended as the one that nobody killed, bit for bit.
        kills: How often it was killed.
        writing: Kills that left a checkpoint half written.
        hung: Runs, or ranks without their launcher, that did not end.
        lost: Resumed runs that began before a checkpoint that was complete, or farther back than they save.
        unpickled: Names that were unpickled.
        seconds: From the start of each resumed run to its first step.
    """

    equal: bool = False
    kills: int = 0
    writing: int = 0
    hung: int = 0
    lost: int = 0
    unpickled: int = 0
    seconds: list[float] = field(default_factory=list)


def killed_once(bench: Bench, ranks: int) -> Row:
    """Kills runs of so many ranks, and resumes them."""
    title = f"kill -9 at random, {ranks} process{'es' if ranks > 1 else ''}"
    return _killed_runs(bench, title, f"kill-{ranks}", [ranks] * bench.times, kills=1)


def killed_twice(bench: Bench) -> Row:
    """Kills runs of one and of two ranks, resumes them, kills them again, and resumes them again."""
    ranks = [1 + number // len(KINDS) % 2 for number in range(bench.times)]
    return _killed_runs(bench, "kill -9 at random, resumed twice, 1 and 2 processes", "kill-twice", ranks, kills=2)


def _killed_runs(bench: Bench, title: str, name: str, ranks: list[int], kills: int) -> Row:
    # Two at a time as well: a kill's moment is chosen within the time that such a run takes.
    two_at_a_time([partial(bench.untouched, many, kind) for many in sorted(set(ranks)) for kind in KINDS])
    tries = [
        partial(_killed, bench, f"{name}-{number}", many, kills, KINDS[number % len(KINDS)])
        for number, many in enumerate(ranks)
    ]
    tallies: list[Tally] = two_at_a_time(tries)
    total = {key: sum(getattr(tally, key) for tally in tallies) for key in Tally.__annotations__ if key != "seconds"}
    result = (
        f"{total['equal']} of {len(tallies)} bit-equal; {total['hung']} hung; {total['lost']} checkpoints lost; "
        f"{total['unpickled']} names unpickled; {total['writing']} of {total['kills']} kills left one half written"
    )
    right = total["equal"] == len(tallies) and not total["hung"] + total["lost"] + total["unpickled"]
    seconds = [second for tally in tallies for second in tally.seconds]
    return Row(title, result, f"{between(seconds)}, start to first step", right)


def _killed(bench: Bench, name: str, ranks: int, kills: int, options: dict[str, Any]) -> Tally:
    chance, tally = bench.chance(name), Tally()
    untouched = bench.untouched(ranks, options)
    with bench.trial(name) as folder:
        job = Job(folder, ranks, options)
        for _ in range(kills):
            if not _kill(bench, name, job, chance, untouched.seconds, tally):
                break
            tally.kills += 1
            tally.writing += any((folder / "checkpoints").glob(".step-*.writing"))
            reached = _reached(folder)
            job = Job(folder, ranks, options)
            _look_at_resumed(bench, name, job, reached, options, tally)
        code = job.wait()
        tally.hung += code is None
        if code != 0:
            bench.wrong(name, "the run hangs" if code is None else f"the run ended with {code}", job)
        else:
            tally.equal = bench.compare(name, folder, untouched, job)
        tally.unpickled = bench.unpickled(name, folder)
    if tally.kills < kills and tally.equal and not tally.hung + tally.lost + tally.unpickled:
        bench.say(f"{name}: it was done before the kill; once more")
        return _killed(bench, f"{name}+", ranks, kills, options)
    bench.say(f"{name}: {'bit-equal' if tally.equal else 'WRONG'}, {ranks} ranks, {options}")
    return tally


def _kill(bench: Bench, name: str, job: Job, chance: Random, seconds: float, tally: Tally) -> bool:
    """Kills a rank, or the launcher with its ranks, at a random moment of the run; whether it was still running."""
    first = job.log.name == "log-0.txt"
    who = "launcher" if job.ranks > 1 and chance.random() < 1 / 3 else chance.randrange(job.ranks)
    moment = chance.random() * (seconds if first else _START_SECONDS + seconds / 2)
    if not job.comes_to("train" if first else "fit", job.ranks):
        bench.wrong(name, "it never began", job)
        return False
    time.sleep(moment)
    if job.process.poll() is not None:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(job.process.pid if who == "launcher" else job.pid(int(who)), signal.SIGKILL)
    code, left = job.wait(60), job.orphans()
    tally.hung += (code is None) + left
    if code is None or left:
        bench.wrong(name, f"after the kill of {who}, {'it hangs' if code is None else f'{left} ranks live on'}", job)
    return code != 0


def _reached(folder: Path) -> tuple[int, int]:
    """The last step whose checkpoint was complete, and the last that was done, by all runs so far."""
    lines = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    steps = [max((line["step"] for line in lines if line["what"] == what), default=0) for what in ("saved", "step")]
    return steps[0], steps[1]


def _look_at_resumed(
    bench: Bench, name: str, job: Job, reached: tuple[int, int], options: dict[str, Any], tally: Tally
) -> None:
    """Looks whether a resumed run goes on from where it should."""
    if not job.comes_to("train"):
        return  # how it ended is said later
    began, (saved, done) = job.trace("train")[0], reached
    tally.seconds.append(began["time"] - job.began)
    behind = int(options.get("every", 4)) * (2 if options["background"] else 1)
    if began["step"] < saved or done - began["step"] > behind:
        tally.lost += 1
        bench.wrong(name, f"step {saved} was saved and {done} done, and it went on from step {began['step']}", job)


def restarted(bench: Bench) -> Row:
    """Kills ranks under a launcher that may start them anew."""
    count = max(2, bench.times // 4)
    two_at_a_time([partial(bench.untouched, 2, kind) for kind in KINDS[:count]])
    tries = [partial(_restarted, bench, f"restart-{number}", number) for number in range(count)]
    done: list[tuple[bool, float]] = two_at_a_time(tries)
    return Row(
        "kill -9 of a rank under --max-restarts 2, every other run twice",
        f"{sum(equal for equal, _ in done)} of {count} went on by themselves, and ended bit-equal",
        f"{between([seconds for _, seconds in done])}, kill to next step",
        all(equal for equal, _ in done),
    )


def _restarted(bench: Bench, name: str, number: int) -> tuple[bool, float]:
    options, chance, kills = KINDS[number % len(KINDS)], bench.chance(name), 1 + number % 2
    untouched, seconds, equal = bench.untouched(2, options), 0.0, False
    with bench.trial(name) as folder:
        job = Job(folder, 2, options, restarts=2)
        for kill in range(kills):
            job.comes_to("train", 2 * (kill + 1))
            # In the first half, so that there is something left to kill.
            time.sleep(chance.random() * untouched.seconds / 2)
            killed = time.time()
            with contextlib.suppress(ProcessLookupError):
                os.kill(job.pid(chance.randrange(2)), signal.SIGKILL)
            job.comes_to("train", 2 * (kill + 2))
            seconds = max(seconds, job.trace("train")[-1]["time"] - killed)
        code, rounds = job.wait(), len(job.trace("train")) // 2
        if code != 0:
            bench.wrong(name, f"the launcher ended with {code}", job)
        elif rounds != kills + 1:
            bench.wrong(name, f"there were {rounds} rounds after {kills} kills", job)
        else:
            equal = _as_untouched(bench, name, folder, untouched, job)
    bench.say(f"{name}: {'bit-equal' if equal else 'WRONG'} after {kills} kills, {options}")
    return equal, seconds


def _as_untouched(bench: Bench, name: str, folder: Path, untouched: Untouched, job: Job) -> bool:
    return bench.compare(name, folder, untouched, job) and not bench.unpickled(name, folder)
