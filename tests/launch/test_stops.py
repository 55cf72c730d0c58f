"""A run that is asked to stop: at the launcher, at one rank, by a scheduler's warning, twice."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from paraflow.errors import LaunchError
from paraflow.launch.options import grace_seconds
from tests.launch.launching import LEAVE, STOPPING, Launched, wait_until


@pytest.mark.parametrize(
    ("number", "at_rank", "status"),
    [
        (signal.SIGINT, False, 130),
        (signal.SIGINT, True, 130),
        (signal.SIGTERM, True, 143),
        (signal.SIGUSR1, False, 138),
    ],
)
def test_all_ranks_save_and_the_launcher_says_by_what_they_were_stopped(
    tmp_path: Path, number: signal.Signals, at_rank: bool, status: int
) -> None:
    # Rank 0 is still saving when the 3 seconds are over that a failure of rank 1 would leave it.
    saving = f"time.sleep({3.5 if at_rank else 0.2} * (rank == 0))\n"
    run = Launched(tmp_path, STOPPING + saving + LEAVE, "--max-restarts", "2")
    pids = run.pids()
    if at_rank:
        os.kill(pids[1], number)
    else:
        run.send(number)
    assert run.end() == (status, f"paraflow launch: stopped by {number.name}.\n")
    assert run.saved() == {"saved0", "saved1"}
    assert sorted((tmp_path / "starts").read_text()) == ["0", "1"]  # a stop starts nothing anew


def test_a_stop_prints_no_traceback_of_ranks_with_a_process_group(tmp_path: Path) -> None:
    group = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
    run = Launched(tmp_path, group + STOPPING + "dist.destroy_process_group()\n" + LEAVE)
    run.pids()
    run.send(signal.SIGINT)
    assert run.end() == (130, "paraflow launch: stopped by SIGINT.\n")


def test_a_stop_leaves_what_a_rank_started_alive_while_it_saves(tmp_path: Path) -> None:
    worker = "import subprocess\nworker = subprocess.Popen(['sleep', '60'])\n"
    text = worker + STOPPING + "time.sleep(0.5)\nassert worker.poll() is None\nworker.kill()\n" + LEAVE
    run = Launched(tmp_path, text, processes=1)
    run.pids(1)
    run.send(signal.SIGTERM)
    assert run.end() == (143, "paraflow launch: stopped by SIGTERM.\n")
    assert run.saved() == {"saved0"}


def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    run = Launched(tmp_path, STOPPING + "(folder / 'saving').touch()\ntime.sleep(60)\n")
    run.pids()
    run.send(signal.SIGTERM)
    wait_until((tmp_path / "saving").exists)
    begin = time.monotonic()
    run.send(signal.SIGTERM)
    status, error = run.end()
    assert time.monotonic() - begin < 10  # 60 seconds of grace were left
    assert (status, error) == (143, "paraflow launch: stopped by SIGTERM.\n")


def test_ranks_that_take_longer_than_the_grace_are_killed_and_named(tmp_path: Path) -> None:
    run = Launched(tmp_path, STOPPING + "time.sleep(60 * rank)\n" + LEAVE, "--grace", "1s")
    os.kill(run.pids()[0], signal.SIGTERM)
    said = "rank 1 did not stop within 1 seconds, and was killed.\nparaflow launch: stopped by SIGTERM.\n"
    assert run.end() == (143, said)


@pytest.mark.parametrize("at_rank", [False, True])
def test_a_rank_that_cannot_save_fails_and_ends_the_others_soon(tmp_path: Path, at_rank: bool) -> None:
    text = STOPPING + "if rank == 1:\n    raise OSError('disk full')\ntime.sleep(60)\n"
    run = Launched(tmp_path, text, "--max-restarts", "0")
    pids = run.pids()
    os.kill(pids[0], signal.SIGTERM) if at_rank else run.send(signal.SIGTERM)
    begin = time.monotonic()
    status, error = run.end()
    assert time.monotonic() - begin < 10
    assert "OSError: disk full" in error
    assert status == (1 if at_rank else 143)


def test_an_error_of_a_rank_while_the_others_stop_in_order_is_the_runs(tmp_path: Path) -> None:
    text = STOPPING + "time.sleep(rank)\nif rank == 1:\n    raise OSError('disk full')\n" + LEAVE
    run = Launched(tmp_path, text, "--max-restarts", "2")
    os.kill(run.pids()[0], signal.SIGTERM)
    status, error = run.end()
    assert status == 1
    assert error.endswith("OSError: disk full\n")
    assert sorted((tmp_path / "starts").read_text()) == ["0", "1"]


def test_a_warning_waits_until_a_rank_listens_and_is_passed_on_twice(tmp_path: Path) -> None:
    text = (
        "import os, pathlib, signal, sys, time\n"
        "folder, heard = pathlib.Path(sys.argv[1]), []\n"
        "(folder / 'pid0').write_text('0')\n"
        "while not (folder / 'sent').exists():\n"
        "    time.sleep(0.02)\n"
        "signal.signal(signal.SIGUSR2, lambda *_: heard.append((folder / 'heard').touch()))\n"
        "while len(heard) < 2:\n"
        "    time.sleep(0.02)\n"
    )
    run = Launched(tmp_path, text, processes=1)
    wait_until((tmp_path / "pid0").exists)
    run.send(signal.SIGUSR2)
    time.sleep(0.5)  # time to send it to a rank that it would kill
    (tmp_path / "sent").touch()
    wait_until((tmp_path / "heard").exists)
    run.send(signal.SIGUSR2)
    assert run.end() == (0, "")


def test_a_closed_terminal_lets_the_ranks_save_but_not_under_nohup(tmp_path: Path) -> None:
    run = Launched(tmp_path, STOPPING + LEAVE, processes=1)
    run.pids(1)
    run.send(signal.SIGHUP)
    assert run.end() == (129, "paraflow launch: stopped by SIGHUP.\n")
    assert (tmp_path / "stop").read_text() == str(int(signal.SIGTERM))
    for path in (tmp_path / "pid0", tmp_path / "stop"):
        path.unlink()
    run = Launched(tmp_path, STOPPING + LEAVE, processes=1, before=("nohup",))
    run.pids(1)
    run.send(signal.SIGHUP)
    time.sleep(0.5)
    assert not (tmp_path / "stop").exists()
    run.send(signal.SIGTERM)
    assert run.end()[0] == 143


def test_grace_is_a_time() -> None:
    assert [grace_seconds(text) for text in ("0", "1.5", "90s", "2 min", "2m", "1h")] == [0, 1.5, 90, 120, 120, 3600]
    for text in ("soon", "-1", "10ep", ""):
        with pytest.raises(LaunchError, match=r"--grace .* is no time\. Write seconds"):
            grace_seconds(text)
