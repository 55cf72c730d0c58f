"""Runs that are started anew by the launcher, and carry on by resume="auto"."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.watch.test_runs import ROOT, SCRIPT, final, run


@pytest.mark.slow
def test_a_killed_rank_is_started_anew_and_the_weights_are_the_same(tmp_path: Path) -> None:
    assert run(2, tmp_path / "whole").code == 0
    killed = run(2, tmp_path / "killed", "--at", "13", "--rank", "1", "--what", "die", launch=["--max-restarts", "1"])
    assert killed.code == 0, killed.output
    assert "was killed by SIGKILL" in killed.output
    assert "resumed from" in killed.output
    for name, weight in final(tmp_path / "whole").items():
        assert torch.equal(final(tmp_path / "killed")[name], weight)


@pytest.mark.slow
def test_a_lost_host_is_done_without(tmp_path: Path) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    hosts = [_host(place, port, tmp_path) for place in (0, 1)]
    log = tmp_path / "host-0.log", tmp_path / "host-1.log"
    _wait_for("at step 11 of 2 ranks", log)
    os.killpg(hosts[1].pid, signal.SIGKILL)  # its ranks end with it
    assert hosts[0].wait(100) == 0, log[0].read_text()
    assert "at step 12 of 1 ranks" in log[0].read_text()
    # Without dropout, which each rank draws for itself, the weights do not depend on how many ranks there are.
    assert run(1, tmp_path / "whole", "--dropout", "0").code == 0
    for name, weight in final(tmp_path / "whole").items():
        torch.testing.assert_close(final(tmp_path / "run")[name], weight, rtol=1e-5, atol=1e-6)


def _host(place: int, port: int, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "paraflow.cli", "launch", "--nnodes", "1:2", "-n", "1", "--node-rank", str(place)]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--max-restarts", "2"]
    with (folder / f"host-{place}.log").open("wb") as log:
        return subprocess.Popen(
            [*command, str(SCRIPT), str(folder / "run"), "--pause", "0.3", "--dropout", "0"],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait_for(text: str, logs: tuple[Path, ...], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not any(text in log.read_text() for log in logs):
        assert time.monotonic() < end, [log.read_text() for log in logs]
        time.sleep(0.1)
