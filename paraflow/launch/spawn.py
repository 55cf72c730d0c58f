"""Running a function as the ranks of one world on this host, from a script or a notebook."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

from paraflow.errors import LaunchError
from paraflow.launch.processes import listens
from paraflow.launch.worker import exit_status, signal_name

WORKER = Path(__file__).with_name("worker.py")

_LOOK_SECONDS = 0.1  # how often a rank that died without a word is looked for
_END_SECONDS = 3.0  # from SIGTERM to SIGKILL when a rank has failed
_STOPS = {128 + number: number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
_EXIT_SECONDS = 30.0  # for a rank that has returned to end its process


def spawn(
    fn: Callable[..., Any],
    processes: int = 2,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    timeout: float | None = None,
    grace: float = 60.0,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` in fresh processes on this host, as the ranks of one world.

    Each process finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, as under
    torchrun; a Trainer in `fn` joins the process group by itself. Works in a notebook, and in a script that has no
    `if __name__ == "__main__":`, because functions of `__main__` are pickled by value.

    Args:
        fn: The function; it, its arguments and its result are sent by cloudpickle.
        processes: The number of ranks.
        args: The arguments of every rank.
        kwargs: The keyword arguments of every rank.
        timeout: The seconds within which every rank must have returned; None waits for ever.
        grace: The seconds that ranks have to stop in order (and to save) after a signal, before they are killed.

    Returns:
        What each rank returned, in order of rank.

    Raises:
        LaunchError: A rank raised (its traceback is in the message), died or was too late. All ranks are ended. Where
            the ranks stopped in order, because one was sent a signal, `exit_code` is 128 + the signal's number.
        KeyboardInterrupt: Ctrl-C, after the ranks have stopped; a second one kills them.
        SystemExit: SIGTERM, with status 143, after the ranks have stopped (where nothing else handles that signal, and
            in the main thread).

    Example:
        >>> import os
        >>> spawn(lambda word: word + os.environ["RANK"], processes=2, args=("rank ",))
        ['rank 0', 'rank 1']
    """
    if processes < 1:
        raise LaunchError(f"spawn was given processes={processes}, but needs at least 1. Write spawn(fn, processes=2).")
    payload = _pickle(fn, args, kwargs or {})
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, but not in torch's __all__

    # The parent holds the store on a port that the system picked, so no other program can take it in between.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    deadline = None if timeout is None else time.monotonic() + timeout
    ranks: list[_Rank] = []
    with _exit_at_sigterm():
        try:
            for rank in range(processes):
                ranks.append(_start(rank, processes, store.port))
            for running in ranks:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died: _collect says so
                    running.connection.send((sys.path, payload))
            return _collect(ranks, deadline, timeout, grace)
        except KeyboardInterrupt:
            _end(ranks, signal.SIGINT, grace)
            raise
        except SystemExit:
            _end(ranks, signal.SIGTERM, grace)
            raise
        finally:
            _end(ranks, signal.SIGTERM, _END_SECONDS)
            for running in ranks:
                running.connection.close()


@contextlib.contextmanager
def _exit_at_sigterm() -> Iterator[None]:
    """Has SIGTERM raise SystemExit(143), where it would end this process without a word to the ranks."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@dataclass(frozen=True)
class _Rank:
    """One rank: its process, and the pipe that its function goes out on and its outcome comes back on."""

    rank: int
    process: subprocess.Popen[bytes]
    connection: Connection

    def died(self) -> LaunchError:
        """The error that says how this rank ended without an outcome."""
        try:
            code = self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # it closed the pipe and lives on: nothing can come back any more
            self.process.kill()
            code = self.process.wait()
        ending = f"was killed by {signal_name(code)}" if code < 0 else f"ended with exit code {code}"
        return LaunchError(f"rank {self.rank} (pid {self.process.pid}) {ending} before it returned.", exit_status(code))


def _pickle(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    import cloudpickle

    try:
        payload: bytes = cloudpickle.dumps((fn, args, kwargs))
    except (TypeError, pickle.PicklingError, AttributeError) as error:
        raise LaunchError(
            f"spawn cannot send {fn!r} with its arguments to another process: {error}. "
            f"Create what cannot be pickled (open files, locks, generators) inside the function."
        ) from error
    return payload


def _start(rank: int, processes: int, port: int) -> _Rank:
    environment = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes)),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # every rank joins the parent's store as a client
    }
    here, there = Pipe()
    with there:
        process = subprocess.Popen(
            [sys.executable, "-u", str(WORKER), "call", str(os.getpid()), str(there.fileno())],
            env=environment,
            pass_fds=[there.fileno()],
            start_new_session=True,  # a Ctrl-C reaches the parent alone, which ends the ranks in order
        )
    return _Rank(rank, process, here)


def _collect(ranks: Sequence[_Rank], deadline: float | None, timeout: float | None, grace: float) -> list[Any]:
    results: dict[int, Any] = {}
    pending = list(ranks)
    while pending:
        looked = time.time()
        ready = wait([running.connection for running in pending], _LOOK_SECONDS)
        failures: list[tuple[float, LaunchError]] = []
        for running in list(pending):
            if running.connection not in ready and running.process.poll() is None:
                continue
            pending.remove(running)
            # A rank that died without a word did so after the last look, and brought down those that raised since.
            when, outcome = _outcome(running, looked)
            if isinstance(outcome, LaunchError):
                failures.append((when, outcome))
            else:
                results[running.rank] = pickle.loads(outcome)
        if failures:
            error = min(failures, key=lambda failure: failure[0])[1]
            # A rank that a signal killed (a negative status) did not stop in order.
            stops = (
                any(running.process.returncode == error.exit_code for running in ranks) and error.exit_code in _STOPS
            )
            raise _stopped(error, pending, grace) if stops else error
        if pending and deadline is not None and time.monotonic() > deadline:
            late = ", ".join(str(running.rank) for running in pending)
            raise LaunchError(f"spawn waited {timeout} seconds, but rank {late} did not return.")
    _wait_for_exit(ranks)
    return [results[running.rank] for running in ranks]


def _stopped(error: LaunchError, others: Sequence[_Rank], grace: float) -> LaunchError:
    """The error of ranks that were asked to stop: one has ended in order, and the others have the time to."""
    begin = listened = time.monotonic()
    while (now := time.monotonic()) - begin < grace:
        alive = [running.process for running in others if running.process.poll() is None]
        if all(listens(process.pid, signal.SIGTERM) for process in alive):
            listened = now
        # A rank that does not listen has agreed to nothing, or has saved and is on its way out.
        if not alive or now - listened > _END_SECONDS:
            break
        time.sleep(_LOOK_SECONDS)
    if any(running.process.poll() != error.exit_code for running in others):
        return error
    return LaunchError(f"The ranks were stopped by {_STOPS[error.exit_code].name}.", error.exit_code)


def _outcome(running: _Rank, looked: float) -> tuple[float, bytes | LaunchError]:
    try:
        # Nothing to read from a process that has ended: something it started still holds the pipe.
        message = running.connection.recv() if running.connection.poll() else None
    except (EOFError, ConnectionResetError):
        message = None
    if message is None:
        return looked, running.died()
    kind, when, content = message
    if kind == "returned":
        return when, content
    return when, LaunchError(f"rank {running.rank} raised:\n{content.decode()}")


def _wait_for_exit(ranks: Sequence[_Rank]) -> None:
    end = time.monotonic() + _EXIT_SECONDS
    for running in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):  # its result is here: _end stops what is left
            running.process.wait(max(0.0, end - time.monotonic()))


def _end(ranks: Sequence[_Rank], first: signal.Signals, grace: float) -> None:
    alive = [running.process for running in ranks if running.process.poll() is None]
    for process in alive:  # alone: the workers that it loads data with must live on while it saves
        process.send_signal(first)
    end = time.monotonic() + grace
    try:
        for process in alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
    finally:  # a second Ctrl-C cuts the grace short
        alive = [process for process in alive if process.poll() is None]
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
