"""A host that is lost while the others go on: two launchers on this one, and one of them is killed with its ranks."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.launch.launching import Launched, wait_until

pytestmark = pytest.mark.slow

# Real collectives: the ranks that are left notice the lost ones as those of a run do.
TRAINING = """
import os, pathlib, sys, time
import torch, torch.distributed as dist
folder = pathlib.Path(sys.argv[1])
dist.init_process_group("gloo")
rank, world, again = dist.get_rank(), dist.get_world_size(), os.environ["TORCHELASTIC_RESTART_COUNT"]
with open(folder / "starts", "a") as file:
    file.write(f"{rank} of {world}, restart {again}, node {os.environ['GROUP_RANK']}\\n")
step, finish = 0, torch.zeros(1)
while finish == 0:  # all see the file at the same step: none may leave a collective alone
    dist.all_reduce(finish.fill_((folder / "finish").exists()))
    time.sleep(0.05)
    step += 1
    if step == 3 and rank == 0:
        (folder / f"running{world}").touch()
os._exit(0)
"""


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _two_launchers(folder: Path, *more: str) -> list[Launched]:
    endpoint = f"127.0.0.1:{_free_port()}"
    meet = ["--rdzv-endpoint", endpoint, "--rdzv-id", "lost", "--nnodes", "1:2", "--max-restarts", "2", *more]
    nodes = []
    for node in range(2):
        place = folder / f"node{node}"
        place.mkdir()
        text = TRAINING.replace("sys.argv[1]", repr(str(folder)))
        nodes.append(Launched(place, text, *meet, "--node-rank", str(node), processes=1))
        if node == 0:
            wait_until(lambda: _listens(endpoint))
    wait_until((folder / "running2").exists, 60)
    return nodes


def _listens(endpoint: str) -> bool:
    host, port = endpoint.split(":")
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) == 0


def test_the_other_host_goes_on_alone_within_seconds(tmp_path: Path) -> None:
    host, lost = _two_launchers(tmp_path)
    begin = time.monotonic()
    lost.send(signal.SIGKILL)  # its rank ends with it
    wait_until((tmp_path / "running1").exists, 60)
    print(f"alone after {time.monotonic() - begin:.1f} seconds")
    (tmp_path / "finish").touch()
    status, error = host.end()
    assert status == 0
    assert error.count("failed with exit code") == 1  # why the rank that was left had to start anew
    first, second, third = (tmp_path / "starts").read_text().splitlines()
    assert sorted((first[:6], second[:6])) == ["0 of 2", "1 of 2"]
    assert third == "0 of 1, restart 1, node 0"
    lost.end()


def test_a_host_that_comes_later_makes_all_start_anew_with_it(tmp_path: Path) -> None:
    host, lost = _two_launchers(tmp_path)
    lost.send(signal.SIGKILL)
    lost.end()
    wait_until((tmp_path / "running1").exists, 60)
    (tmp_path / "running2").unlink()
    words = [str(word) for word in lost.process.args]  # type: ignore[union-attr]
    again = Launched(tmp_path / "node1", (tmp_path / "node1" / "train.py").read_text(), *words[6:-2], processes=1)
    wait_until((tmp_path / "running2").exists, 60)
    (tmp_path / "finish").touch()
    assert [run.end()[0] for run in (host, again)] == [0, 0]


def test_without_the_host_of_the_rendezvous_the_run_ends_and_says_so(tmp_path: Path) -> None:
    host, left = _two_launchers(tmp_path)
    host.send(signal.SIGKILL)
    status, error = left.end(60)
    assert status == 1
    assert "paraflow launch: The node that hosts the rendezvous at 127.0.0.1:" in error
    assert 'fit(resume="auto")' in error
    host.end()


def test_a_killed_rank_starts_both_anew(tmp_path: Path) -> None:
    run = Launched(tmp_path, TRAINING, "--max-restarts", "1")
    wait_until((tmp_path / "running2").exists, 60)
    (tmp_path / "running2").unlink()
    children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    wait_until((tmp_path / "running2").exists, 60)
    (tmp_path / "finish").touch()
    status, error = run.end()
    assert status == 0
    assert error.count("it was killed by SIGKILL.") == 1
    starts = [line.split(", node")[0] for line in (tmp_path / "starts").read_text().splitlines()]
    assert sorted(starts) == [
        "0 of 2, restart 0",
        "0 of 2, restart 1",
        "1 of 2, restart 0",
        "1 of 2, restart 1",
    ]
