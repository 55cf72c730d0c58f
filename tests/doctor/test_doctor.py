from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from paraflow.doctor import measure, report
from paraflow.doctor.examination import examine
from paraflow.doctor.findings import all_reduce_table, find
from paraflow.doctor.host import connected_interfaces, disk_facts, usable_cores
from tests.pool import Pool

ROOT = Path(__file__).parents[2]
Ranks = list[dict[str, Any]]
PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _run(*words: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in PLACES}
    environment.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", **more)
    command = [sys.executable, "-m", "paraflow.cli", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def test_two_ranks_measure_a_right_sum_of_every_size(tmp_path: Path) -> None:
    done = _run("doctor", "-n", "2", "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert done.stderr == ""
    assert done.returncode == int(any(finding["severity"] == "error" for finding in found["findings"]))
    assert [row["bytes"] for row in found["all_reduce"]] == [1024 * 4**power for power in range(9)]
    for row in found["all_reduce"]:
        assert row["right"]
        assert row["algorithm"] == pytest.approx(row["bytes"] / row["seconds"])
        assert row["bus"] == pytest.approx(row["algorithm"])  # 2 (n - 1) / n is 1 for two ranks
    assert [facts["rank"] for facts in found["ranks"]] == [0, 1]
    for facts in found["ranks"]:
        assert facts["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
        assert facts["backends"]["gloo"] is True
        assert abs(facts["clock"][0]) <= facts["clock"][1] + 1e-3  # one host has one clock
        assert facts["used_interfaces"] != []
        assert facts["measured"]["compute"] > 0
    assert found["ranks"][0]["disk"]["folder"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_as_a_module_of_the_launcher_an_error_is_every_ranks_and_status_1() -> None:
    done = _run("launch", "-n", "2", "-m", "paraflow.doctor", cwd=Path("/proc"))  # where nobody can write
    assert "cannot write in /proc" in " ".join(done.stdout.split())
    assert "All-reduce between 2 ranks" in done.stdout
    rank, _, said = done.stderr.partition(" refused: ")
    assert rank in ("rank 0", "rank 1")
    assert said == "LaunchError: The doctor found an error; its report says what to do.\n"
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"RANK": "0"}, "The environment has RANK but no WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "The environment has WORLD_SIZE=2 but not both MASTER_ADDR and MASTER_PORT"),
    ],
)
def test_a_half_set_environment_is_an_error(tmp_path: Path, variables: dict[str, str], sentence: str) -> None:
    done = _run("doctor", "-n", "1", cwd=tmp_path, **variables)
    assert f"error: {sentence}" in " ".join(done.stdout.split())
    assert done.returncode == 1


@pytest.fixture(scope="module")
def healthy() -> dict[str, Any]:
    """This process's own facts, with the numbers of a large and idle host."""
    facts = examine()[0]
    large = {"total": 1 << 40, "free": 1 << 39}
    facts.update(cores=64.0, threads=1, open_files=65536, shared_memory=large, nvidia_driver=False)
    facts.update(memory={"total": 1 << 36, "available": 1 << 35, "limit": None}, unrelated_apex=False)
    facts.update(hostname="one", address="10.0.0.1", environment={}, local_world_size=1)
    facts["interfaces"] = {"lo": {"address": "127.0.0.1", "speed": None}, "eth0": {"address": "10", "speed": 10_000}}
    facts["disk"] = {"folder": "/data", "write": 1e9, "sync_seconds": 1e-3, **large}
    rows = [{"bytes": 1 << 26, "seconds": 0.1, "right": True}]
    facts["measured"] = {"device": "cpu", "compute": 1e11, "exchange": 1e9, "all_reduce": rows}
    facts.update(clock=[0.0, 1e-3], used_interfaces=["eth0"])
    return facts


def _on_two_hosts(facts: dict[str, Any]) -> Ranks:
    other = {**copy.deepcopy(facts), "rank": 1, "hostname": "two", "address": "10.0.0.2"}
    return [copy.deepcopy(facts), other]


def _change(*path: str, to: Any) -> Callable[[Ranks], None]:
    def change(ranks: Ranks) -> None:
        place: Any = ranks[1]
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = to

    return change


def test_nothing_is_wrong_with_healthy_hosts(healthy: dict[str, Any]) -> None:
    assert find(_on_two_hosts(healthy)) == []


WRONG = [{"bytes": 1 << 26, "seconds": 0.1, "right": False}]
SLOW = [{"bytes": 1 << 26, "seconds": 2.0, "right": True}]


@pytest.mark.parametrize(
    ("change", "severity", "sentence", "remedy"),
    [
        (_change("versions", "torch", to="2.0"), "error", "versions of torch: ", "Install the same versions"),
        (_change("versions", "numpy", to=None), "warning", "None on rank 1", "Install the same versions"),
        (_change("nvidia_driver", to=True), "error", "two has an NVIDIA driver, but torch", "CUDA build of torch"),
        (_change("unrelated_apex", to=True), "warning", "`apex` is PyPI's", "pip uninstall apex"),
        (_change("threads", to=128), "warning", "1 ranks of 128 threads each want", "OMP_NUM_THREADS=64"),
        (_change("local_world_size", to=65), "warning", "two has 65 ranks that compute on 64 cores", "-n 64"),
        (_change("shared_memory", "free", to=64 << 20), "warning", "/dev/shm of two has 64 MiB", "--shm-size"),
        (_change("open_files", to=256), "warning", "may open 256 files", "ulimit -n"),
        (_change("memory", "limit", to=512 << 20), "warning", "two has 512 MiB of memory", "memory limit"),
        (_change("disk", "free", to=1 << 30), "warning", "nearly full: 1.0 GiB", "Free space"),
        (_change("disk", "error", to="No space left"), "error", "two cannot write in /data", "Start where"),
        (_change("address", to="127.0.1.1"), "error", "The name two resolves to 127.0.1.1", "GLOO_SOCKET_IFNAME"),
        (_change("clock", to=[2.0, 0.1]), "warning", "clock of two differs from that of rank 0 by +2.0", "chrony"),
        (_change("clock", to=[-9.0, 0.1]), "error", "by -9.0 seconds", "chrony"),
        (_change("measured", to={"error": "timed out"}), "error", "Rank 1 (two) could not take part", "SOCKET_IFNAME"),
        (_change("measured", "all_reduce", to=WRONG), "error", "Rank 1 (two) got wrong sums of 67108864", "not train"),
        (_change("measured", "all_reduce", to=SLOW), "warning", "reach 0.034 GB/s, and its link carries 1.2", "faster"),
        (_change("measured", "compute", to=1e10), "warning", "Rank 1 (two) computes at 10 GFLOP/s", "other programs"),
        (_change("measured", "exchange", to=1e8), "warning", "exchanges with its neighbours at 0.1 GB/s", "cables"),
    ],
)
def test_what_is_wrong_is_a_sentence_with_a_remedy(
    healthy: dict[str, Any], change: Callable[[Ranks], None], severity: str, sentence: str, remedy: str
) -> None:
    ranks = _on_two_hosts(healthy)
    change(ranks)
    (finding,) = find(ranks)
    assert finding.severity == severity
    assert sentence in finding.sentence
    assert remedy in finding.remedy


def test_errors_come_first_and_the_report_has_them_all(healthy: dict[str, Any]) -> None:
    ranks = _on_two_hosts(healthy)
    _change("open_files", to=256)(ranks)
    _change("nvidia_driver", to=True)(ranks)
    assert [finding.severity for finding in find(ranks)] == ["error", "warning"]
    from rich.console import Console

    text = StringIO()
    report.show(ranks, Console(file=text, width=300))
    for finding in find(ranks):
        assert f"{finding.severity}: {finding.sentence} {finding.remedy}" in text.getvalue()
    assert json.loads(report.as_json(ranks))["findings"] == [finding.as_dict() for finding in find(ranks)]


def test_the_slowest_rank_gives_the_bandwidth() -> None:
    ranks = [
        {"measured": {"all_reduce": [{"bytes": 1000, "seconds": seconds, "right": seconds < 3}]}}
        for seconds in (1.0, 4.0, 2.0, 2.0)
    ]
    (row,) = all_reduce_table(ranks)
    assert row == {"bytes": 1000, "seconds": 4.0, "right": False, "algorithm": 250.0, "bus": 375.0}


def _offset_with_a_clock_ahead(ahead: float) -> tuple[float, float]:
    import time

    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    clock = types.SimpleNamespace(time=lambda: time.time() + ahead * rank)
    measure.time = clock  # type: ignore[assignment]
    try:
        return measure.clock_offset(dist.distributed_c10d._get_default_store(), rank, dist.get_world_size())
    finally:
        measure.time = time


def test_a_clock_that_is_ahead_is_found(ranks: Pool) -> None:
    first, (offset, error) = ranks(2, _offset_with_a_clock_ahead, 3.0)
    assert first == (0.0, 0.0)
    assert abs(offset - 3.0) <= error + 1e-3
    assert error < 1


def test_cores_are_those_that_this_process_may_use() -> None:
    core = min(os.sched_getaffinity(0))
    program = f"import os; os.sched_setaffinity(0, [{core}]); import paraflow.doctor.host as h; print(h.usable_cores())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert float(done.stdout) == min(1.0, usable_cores())


def test_the_interface_of_a_connection_is_found_and_that_to_the_store_left_out() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            assert "lo" in connected_interfaces(None)


def test_the_disk_is_written_and_left_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    facts = disk_facts(1 << 20)
    assert facts["write"] > 0
    assert facts["sync_seconds"] > 0
    assert list(tmp_path.iterdir()) == []
    monkeypatch.chdir("/proc")
    assert "error" in disk_facts(1 << 20)
