from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paraflow.errors import LaunchError
from paraflow.launch import spawn

ROOT = Path(__file__).parents[2]

# No `if __name__ == "__main__":`, a global of the script, a result of the script's own class.
SCRIPT = """
import dataclasses, paraflow.launch

@dataclasses.dataclass
class Sum:
    total: float

factor = 10

def train(extra):
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor(float(dist.get_rank() + extra))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return Sum(float(total) * factor)

results = paraflow.launch.spawn(train, processes=2, args=(1,))
assert all(type(result) is Sum for result in results)
print(results)
"""


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_a_script_without_a_guard_trains_in_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stderr == ""
    assert done.stdout == "[Sum(total=30.0), Sum(total=30.0)]\n"


def test_results_come_in_order_of_rank_and_may_be_large() -> None:
    def large(size: int, factor: int = 1) -> torch.Tensor:
        rank = int(os.environ["RANK"])
        time.sleep(0.1 * (2 - rank))
        return torch.full((size,), rank * factor)

    results = spawn(large, processes=3, args=(100_000,), kwargs={"factor": 7})
    assert [result.unique().tolist() for result in results] == [[0], [7], [14]]


def test_an_exception_ends_all_ranks_and_shows_its_traceback(tmp_path: Path) -> None:
    def fail() -> None:
        (tmp_path / os.environ["RANK"]).write_text(str(os.getpid()))
        if os.environ["RANK"] == "1":
            while not (tmp_path / "0").exists():
                time.sleep(0.01)
            raise ValueError("no such luck")
        time.sleep(60)

    begin = time.monotonic()
    with pytest.raises(LaunchError, match=r"(?s)^rank 1 raised:\nTraceback .* in fail\nValueError: no such luck\n$"):
        spawn(fail, processes=2)
    assert time.monotonic() - begin < 5
    assert not _is_alive(int((tmp_path / "0").read_text()))


def test_a_rank_that_dies_is_named_with_its_signal_or_exit_code() -> None:
    def die(how: Callable[[], None]) -> None:
        if os.environ["RANK"] == "0":
            how()
        time.sleep(60)

    with pytest.raises(LaunchError, match=r"^rank 0 \(pid \d+\) was killed by SIGKILL before it returned") as caught:
        spawn(die, args=(lambda: os.kill(os.getpid(), signal.SIGKILL),))
    assert caught.value.exit_code == 137
    with pytest.raises(LaunchError, match=r"^rank 0 \(pid \d+\) ended with exit code 3 before it returned") as caught:
        spawn(die, args=(lambda: sys.exit(3),))
    assert caught.value.exit_code == 3


def test_a_rank_that_is_late_ends_the_call() -> None:
    def wait_for_ever() -> None:
        if os.environ["RANK"] == "1":
            time.sleep(60)

    with pytest.raises(LaunchError, match=r"waited 0\.5 seconds, but rank 1 did not return"):
        spawn(wait_for_ever, timeout=0.5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_its_parent(tmp_path: Path, number: signal.Signals) -> None:
    program = (
        "import os, pathlib, sys, time, paraflow.launch\n"
        "def run(folder):\n"
        "    part = pathlib.Path(folder, os.environ['RANK'] + '.part')\n"
        "    part.write_text(str(os.getpid()))\n"
        "    part.rename(part.with_suffix('.pid'))\n"
        "    time.sleep(60)\n"
        "paraflow.launch.spawn(run, args=(sys.argv[1],))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", program, tmp_path], env=environment, stderr=subprocess.DEVNULL)
    _wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    parent.send_signal(number)
    assert parent.wait(20) == -number
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    _wait_until(lambda: not any(_is_alive(pid) for pid in pids), 5)


def test_what_cannot_be_sent_and_no_processes_are_sentences() -> None:
    with pytest.raises(LaunchError, match=r"cannot send .* Create what cannot be pickled"):
        spawn(print, args=((number for number in range(3)),))
    with pytest.raises(LaunchError, match="processes=0, but needs at least 1"):
        spawn(print, processes=0)


STOPPED = """
import os, pathlib, signal, sys, time, paraflow.launch
folder, saving = pathlib.Path(sys.argv[1]), float(sys.argv[2])

def train():
    rank = os.environ["RANK"]
    def save(number, frame):
        time.sleep(saving * (rank == "0"))
        (folder / f"saved{rank}").touch()
        sys.exit(128 + number)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, save)
    (folder / f"part{rank}").write_text(str(os.getpid()))
    (folder / f"part{rank}").replace(folder / f"pid{rank}")
    time.sleep(60)

try:
    paraflow.launch.spawn(train)
except paraflow.errors.LaunchError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize(
    ("number", "to_ranks", "status", "said"),
    [
        (signal.SIGTERM, False, 143, ""),
        (signal.SIGINT, False, -2, ""),
        (signal.SIGTERM, True, 143, "The ranks were stopped by SIGTERM.\n"),
    ],
)
def test_ranks_that_are_stopped_save_first(
    tmp_path: Path, number: signal.Signals, to_ranks: bool, status: int, said: str
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", "import paraflow.errors" + STOPPED, str(tmp_path), "3.5" if to_ranks else "0.2"]
    pipe = subprocess.PIPE
    parent = subprocess.Popen(words, env=environment, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    _wait_until(lambda: len(list(tmp_path.glob("pid*"))) == 2)
    for pid in [int(path.read_text()) for path in tmp_path.glob("pid*")] if to_ranks else [parent.pid]:
        os.kill(pid, number)
    out, _ = parent.communicate(timeout=30)
    assert (parent.returncode, out) == (status, said)
    assert {path.name for path in tmp_path.glob("saved*")} == {"saved0", "saved1"}
