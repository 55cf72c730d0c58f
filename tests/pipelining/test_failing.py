"""A stage that fails ends the ranks that wait for its messages."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from paraflow.waiting import waits_for
from paraflow.watch.position import position
from paraflow.watch.verdict import judge

ROOT = Path(__file__).parents[2]
LAUNCH = [sys.executable, "-m", "paraflow.cli", "launch", "-n", "2", str(Path(__file__).with_name("failing.py"))]


def test_a_rank_that_waits_for_a_message_says_so() -> None:
    here = threading.get_ident()
    with waits_for("a message from rank 1"):
        waiting = position(0, 5, 60.0, here)
    verdict = judge([waiting, position(1, 5, 60.0, here)], {}, world_size=2)
    assert verdict.hopeless
    assert verdict.missing == (1,)
    assert "waits in a message from rank 1" in verdict.text


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("linger",)])
def test_a_stage_that_fails_ends_all_ranks(words: tuple[str, ...]) -> None:
    ended = subprocess.run(
        [*LAUNCH, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1, ended.stdout
    assert "the broken stage" in ended.stdout
    if words:  # the other rank says where it was
        assert "a message" in ended.stdout
