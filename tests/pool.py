"""Live ranks for tests: processes that have imported torch once, and run one function after another as a world."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

MAX_RANKS = 4
IMPORTED = ["torch._dynamo", "torch.distributed.fsdp", "paraflow.trainer", "paraflow.callbacks", "tests.pool"]
_FAILED_SECONDS = 1.0  # how long the other ranks may take to say how they fared, after one has raised


class RankError(Exception):
    """A rank of a pool raised, died or was too late; the message holds its traceback."""


@dataclass
class Pool:
    """Up to four live ranks, started when first needed and killed after a failure."""

    workers: list[_Worker] = field(default_factory=list)

    def __post_init__(self) -> None:
        atexit.register(self.close)  # multiprocessing would wait for the ranks for ever

    def __call__(
        self, world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """Run `fn(*args, **kwargs)` as every rank of a world, and return the results in order of rank.

        Args:
            world_size: How many ranks: 1 to 4.
            fn: A function of a test module, importable by its name.
            args: The arguments of every rank.
            timeout: The seconds the call may take. It is not handed to `fn`.
            kwargs: The keyword arguments of every rank.

        Raises:
            RankError: A rank raised, died or was too late. The ranks are killed; the next call starts new ones.
        """
        import torch.distributed as dist

        if not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"A test asked for {world_size} ranks, but the pool has 1 to {MAX_RANKS}.")
        self._grow(world_size)
        # A store of its own for each call, so that no call sees the keys of another.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        used = self.workers[:world_size]
        try:
            for rank, worker in enumerate(used):
                worker.send(
                    pickle.dumps((_environment(rank, world_size, store.port), pickle.dumps((fn, args, kwargs))))
                )
            return _collect(used, timeout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill all ranks."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()
            worker.connection.close()
        self.workers.clear()

    def _grow(self, world_size: int) -> None:
        if any(not worker.process.is_alive() for worker in self.workers):
            self.close()
        # Forked from a process that has imported all that takes long, and has started neither threads nor devices.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        while len(self.workers) < world_size:
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), name=f"rank-{len(self.workers)}")
            with _environment_variable("OMP_NUM_THREADS", "1"):
                process.start()
            there.close()
            self.workers.append(_Worker(process, here))


@dataclass(frozen=True)
class _Worker:
    process: multiprocessing.process.BaseProcess
    connection: Connection

    def send(self, message: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died: _collect says so
            self.connection.send_bytes(message)

    def outcome(self) -> tuple[str, float, Any]:
        try:
            kind, when, content = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join(5)
            return "raised", 0.0, f"The process died (exit code {self.process.exitcode})."
        return kind, when, content


def _collect(workers: Sequence[_Worker], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[tuple[float, int, str]] = []
    deadline = time.monotonic() + timeout
    pending = {worker.connection: rank for rank, worker in enumerate(workers)}
    while pending:
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = pending.pop(connection)
            kind, when, content = workers[rank].outcome()
            if kind == "returned":
                results[rank] = content
                continue
            if not failures:
                deadline = min(deadline, time.monotonic() + _FAILED_SECONDS)
            failures.append((when, rank, content))
    if failures:
        blocks = [f"rank {rank} raised:\n{content}" for _, rank, content in sorted(failures)]
        raise RankError("\n".join(blocks))
    if pending:
        raise RankError(f"After {timeout} seconds these ranks had not returned: {sorted(pending.values())}.")
    return [results[rank] for rank in range(len(workers))]


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


@contextlib.contextmanager
def _environment_variable(name: str, value: str) -> Any:
    former = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if former is None:
            del os.environ[name]
        else:
            os.environ[name] = former


def _serve(connection: Connection) -> None:
    """A rank's whole life: take a function, run it, clean up, answer."""
    from paraflow.launch.worker import end_with_parent

    end_with_parent(os.getppid())
    import torch

    torch.set_num_threads(1)
    clean = dict(os.environ)
    while True:
        try:
            environment, payload = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        os.environ.update(environment)
        _seed()
        try:
            fn, args, kwargs = pickle.loads(payload)
            answer = pickle.dumps(("returned", time.time(), fn(*args, **kwargs)))
        except BaseException:
            # Sent before the clean-up, which after a failure may wait for ranks that never come.
            connection.send_bytes(pickle.dumps(("raised", time.time(), traceback.format_exc())))
            _clean_up(clean)
            continue
        _clean_up(clean)
        connection.send_bytes(answer)


def _seed() -> None:
    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def _clean_up(environment: dict[str, str]) -> None:
    import gc

    import torch
    import torch.distributed as dist

    gc.collect()  # what still holds a process group holds its threads
    shutdown = getattr(sys.modules.get("paraflow.mesh"), "shutdown", None)
    if shutdown is not None:
        shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
