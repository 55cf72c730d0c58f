from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paraflow.errors import LaunchError
from paraflow.launch import is_main, local_rank, local_world_size, rank, world_size

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_a_process_that_nothing_launched_is_the_only_rank() -> None:
    assert (rank(), world_size(), local_rank(), local_world_size(), is_main()) == (0, 1, 0, 1, True)


def test_the_four_variables_of_torchrun_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(NAMES, ("5", "8", "1", "4"), strict=True):
        monkeypatch.setenv(name, value)
    assert (rank(), world_size(), local_rank(), local_world_size(), is_main()) == (5, 8, 1, 4, False)


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("RANK", "one", rank),
        ("RANK", "-1", rank),
        ("WORLD_SIZE", "0", world_size),
        ("WORLD_SIZE", "", world_size),
        ("LOCAL_RANK", "1.0", local_rank),
        ("LOCAL_WORLD_SIZE", "x", local_world_size),
    ],
)
def test_a_malformed_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, read: object) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=f"says {name}={value!r}, but {name} must be a whole number"):
        read()  # type: ignore[operator]


def test_a_rank_outside_its_world_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="RANK=2 with WORLD_SIZE=2"):
        rank()


def test_launch_adds_no_heavy_import() -> None:
    program = "import sys, torch; old = set(sys.modules); import paraflow.launch; print(*set(sys.modules) - old)"
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    added = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    ).stdout.split()
    heavy = ("torch.distributed.elastic", "cloudpickle", "typer", "rich", "torchmetrics")
    assert "paraflow.launch" in added
    assert [name for name in added if name.startswith(heavy)] == []
