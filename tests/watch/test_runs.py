"""Signals, failures and stalls in real runs: how they end, and that nothing is lost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from paraflow.checkpoint import saved_in

SCRIPT = Path(__file__).with_name("script.py")
ROOT = Path(__file__).parents[2]


@dataclass
class Ended:
    code: int
    output: str
    seconds: float


def run(ranks: int, folder: Path, *words: str, launch: Sequence[str] = (), **options: Any) -> Ended:
    launch = ["-m", "paraflow.cli", "launch", "-n", str(ranks), *launch] if ranks > 1 else []
    more = ["--options", json.dumps(options)] if options else []
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, *launch, str(SCRIPT), str(folder), *words, *more],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return Ended(done.returncode, done.stdout, time.monotonic() - began)


def final(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "final.pt", weights_only=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, torch.Tensor]]:
    """The weights of runs that nothing stops, by the number of ranks."""
    weights = {}
    for ranks in (1, 2):
        folder = tmp_path_factory.mktemp(f"whole-{ranks}")
        assert run(ranks, folder).code == 0
        weights[ranks] = final(folder)
    return weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "words", "code", "options"),
    [
        (1, ("--what", "term"), -15, {}),
        (1, ("--what", "interrupt", "--workers", "2"), -2, {}),
        (2, ("--what", "term", "--rank", "1"), 143, {}),
        (2, ("--what", "interrupt", "--rank", "0"), 130, {}),
        (2, ("--what", "usr1", "--rank", "1", "--workers", "2"), 138, {"preempt_signal": "SIGUSR1"}),
    ],
)
def test_a_signal_saves_at_a_step_and_the_run_goes_on_to_the_bit(
    tmp_path: Path,
    whole: dict[int, dict[str, torch.Tensor]],
    ranks: int,
    words: tuple[str, ...],
    code: int,
    options: dict[str, Any],
) -> None:
    # Seven steps: in the second epoch, where no checkpoint is due.
    stopped = run(ranks, tmp_path, "--at", "7", *words, **options)
    assert stopped.code in (code, 128 - code), stopped.output
    (saved,) = saved_in(tmp_path)
    step = int(saved.name.removeprefix("step-"))
    assert 8 <= step < 20
    assert f"the run stops after step {step}" in stopped.output
    resumed = run(ranks, tmp_path)
    assert resumed.code == 0, resumed.output
    assert f"resumed from {saved} at step {step}" in resumed.output
    for name, weight in final(tmp_path).items():
        assert torch.equal(weight, whole[ranks][name])


@pytest.mark.slow
def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    stopped = run(1, tmp_path, "--at", "7", "--what", "twice")
    assert stopped.code == 143
    assert stopped.seconds < 60  # the callback sleeps for 100
    assert saved_in(tmp_path) == []


@pytest.mark.slow
def test_a_stalled_rank_is_named_with_its_line(tmp_path: Path) -> None:
    line = next(n for n, text in enumerate(SCRIPT.read_text().splitlines(), 1) if "the stalled line" in text)
    ended = run(2, tmp_path, "--at", "7", "--rank", "1", "--what", "sleep", stall_timeout="3s")
    assert ended.code == 1
    assert "rank 0 waits for rank 1." in ended.output
    assert f"rank 1: after step 7, at script.py:{line} in sleep, is in no collective" in ended.output
    assert re.search(r"rank 0: after step 7, .* waits in all_reduce\(float\[147\]\), number \d+", ended.output)
    assert "time.sleep(100)  # the stalled line" in ended.output  # its stack
    assert ended.output.rstrip().endswith("write Trainer(stall_timeout='2h').")


@pytest.mark.slow
def test_a_rank_that_answers_nothing_is_named(tmp_path: Path) -> None:
    ended = run(2, tmp_path, "--at", "7", "--rank", "1", "--what", "freeze", stall_timeout="3s")
    assert ended.code == 1
    assert "rank 0 waits for rank 1." in ended.output
    assert "rank 1: does not answer" in ended.output


@pytest.mark.slow
def test_ranks_do_not_wait_for_one_that_failed_and_lives_on(tmp_path: Path) -> None:
    ended = run(2, tmp_path, "--at", "7", "--rank", "1", "--what", "fail", "--linger")
    assert ended.code == 1
    assert ended.seconds < 60  # the failed rank sleeps for 100
    assert ended.output.rstrip().endswith("ValueError: the broken rank")


def test_one_process_saves_on_sigterm(tmp_path: Path) -> None:
    stopped = run(1, tmp_path, "--at", "7", "--what", "term")
    assert stopped.code in (143, -15)
    assert len(saved_in(tmp_path)) == 1
