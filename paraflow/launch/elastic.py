"""`paraflow launch`: torch's elastic launcher, with the exit code and the traceback of the rank that failed first."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from paraflow.errors import LaunchError
from paraflow.launch.failure import Failure, read_failure
from paraflow.launch.spawn import WORKER
from paraflow.launch.worker import exit_status

_GRACE_SECONDS = 3  # from SIGTERM to SIGKILL when a rank has failed
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class LaunchOptions:
    """What `paraflow launch` was asked for.

    Attributes:
        script: The path of the script, or the name of the module where `module` is set.
        arguments: The arguments of the script, handed on untouched.
        processes: The processes on this node: a number, "auto", "gpu" or "cpu"; None is one per accelerator, else 1.
        nodes: The number of nodes, or the least and the most of them as "MIN:MAX".
        node_rank: Which node this is; node 0 hosts the rendezvous. With the backend "static" it also orders the ranks.
        rendezvous_endpoint: The host:port where the nodes meet; none is needed on one node.
        rendezvous_backend: "c10d", "static", or another backend that torch knows.
        rendezvous_id: The name of the run, the same on all nodes.
        max_restarts: How often all ranks are started anew after one has failed.
        module: Whether `script` names a module, as in `python -m`.
    """

    script: str
    arguments: tuple[str, ...] = ()
    processes: str | None = None
    nodes: str = "1"
    node_rank: int | None = None
    rendezvous_endpoint: str = ""
    rendezvous_backend: str = "c10d"
    rendezvous_id: str = "paraflow"
    max_restarts: int = 0
    module: bool = False


def launch(options: LaunchOptions) -> int:
    """Run a script as the ranks of a run, and wait for them.

    A rank that fails ends all ranks within seconds. Ranks print no traceback of their own: the first failure is the
    last thing printed, to stderr, after one line for each rank here that failed with another message. An error that
    Paraflow raised on purpose is its sentence alone; PARAFLOW_TRACEBACK=1 in the environment adds the traceback.

    A signal that asks this process to stop reaches the ranks first; a second one kills them.

    Returns:
        0, or the exit status of the rank that failed first (128 + the number of the signal that killed it), or
        128 + the number of the signal that stopped this process.

    Raises:
        LaunchError: The script does not exist, an option makes no sense (exit code 2), or the nodes did not meet.
    """
    processes = local_processes(options.processes)
    _check_script(options)
    parameters = _rendezvous_parameters(options)
    with _launcher_state(processes), tempfile.TemporaryDirectory(prefix="paraflow-launch-") as logs:
        try:
            handler = get_rendezvous_handler(parameters)
            agent = _Agent(_worker_spec(options, processes, parameters, handler), DefaultLogsSpecs(log_dir=logs))
            return _run(agent, handler)
        except RendezvousError as error:
            place = options.rendezvous_endpoint or "this host"
            raise LaunchError(f"The nodes of the run could not meet at {place}: {error}") from error


def local_processes(text: str | None) -> int:
    """The number of processes to start on this node.

    Args:
        text: A number, "auto" (accelerators, else cores), "gpu", "cpu", or None for one per accelerator, else 1.

    Raises:
        LaunchError: It is none of these, below 1, or asks for accelerators that are not here.

    Example:
        >>> local_processes("4")
        4
    """
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    accelerators = torch.accelerator.device_count() if kind is not None else 0
    if text is None:
        return accelerators or 1
    if text.isdecimal() and int(text) > 0:
        return int(text)
    if text == "cpu":
        return os.cpu_count() or 1
    if text == "auto":
        return accelerators or os.cpu_count() or 1
    if kind is not None and (text == kind.type or (text == "gpu" and kind.type == "cuda")):
        return accelerators
    if text == "gpu":
        raise LaunchError("-n gpu asks for a process per GPU, but torch sees no GPU here. Write -n 2 or -n cpu.", 2)
    raise LaunchError(
        f"-n {text} is no number of processes. Write a whole number of at least 1, or auto, gpu or cpu.", 2
    )


def _check_script(options: LaunchOptions) -> None:
    if options.module or Path(options.script).is_file():
        return
    if Path(options.script).is_dir() and Path(options.script, "__main__.py").is_file():
        return
    raise LaunchError(
        f"There is no script {options.script!r} in {Path.cwd()}. Write the path of a Python file, or -m and a module.",
        2,
    )


def _rendezvous_parameters(options: LaunchOptions) -> RendezvousParameters:
    found = re.fullmatch(r"(\d+)(?::(\d+))?", options.nodes)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise LaunchError(f"--nnodes {options.nodes} is no number of nodes. Write a number, or MIN:MAX such as 1:4.", 2)
    if options.max_restarts < 0:
        raise LaunchError(f"--max-restarts {options.max_restarts} is below 0. Write 0 to fail at the first failure.", 2)
    endpoint = options.rendezvous_endpoint
    if most == 1 and not endpoint:
        # Port 0: the launcher's own store takes a free port, so two launches on one host cannot meet by accident.
        return RendezvousParameters("c10d", "localhost:0", uuid.uuid4().hex, 1, 1, local_addr="127.0.0.1")
    if not endpoint:
        raise LaunchError(f"--nnodes {options.nodes} needs --rdzv-endpoint host:port, the same on every node.", 2)
    more: dict[str, Any] = {"timeout": 900}
    if options.rendezvous_backend == "static":
        if options.node_rank is None or least != most or not re.search(r":\d+$", endpoint):
            raise LaunchError(
                "--rdzv-backend static needs --node-rank, one --nnodes number, and the endpoint's port.", 2
            )
        more["rank"] = options.node_rank
    elif options.node_rank is not None:
        more["is_host"] = options.node_rank == 0
    return RendezvousParameters(options.rendezvous_backend, endpoint, options.rendezvous_id, least, most, **more)


def _worker_spec(
    options: LaunchOptions, processes: int, parameters: RendezvousParameters, handler: RendezvousHandler
) -> WorkerSpec:
    command = ["-m"] if options.module else []
    command += [options.script, *options.arguments]
    # The agent expands ${local_rank} in arguments; ours are the script's own.
    command = [word.replace("$", "$$") for word in command]
    return WorkerSpec(
        role="rank",
        local_world_size=processes,
        entrypoint=sys.executable,
        args=("-u", str(WORKER), "script", str(os.getpid()), *command),
        rdzv_handler=handler,
        max_restarts=options.max_restarts,
        monitor_interval=0.1,
        local_addr=parameters.local_addr,
    )


class _Agent(LocalElasticAgent):
    """Torch's agent, that remembers which rank failed first and does not wait for the others for long."""

    failure: Failure | None = None
    stopping = False
    _looked = 0.0

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Stop the ranks at the first signal, kill them at the second."""
        if self.stopping:
            self.kill()
            return
        self.stopping = True
        raise SignalException(f"stopped by signal {number}", signal.Signals(number))

    def kill(self) -> None:
        """Kill every rank that is left, with all that it started."""
        for process in self._processes().values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _processes(self) -> dict[int, Any]:
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return {local_rank: handler.proc for local_rank, handler in handlers.items()}

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self.failure is not None:  # the ranks are started anew, and nothing else tells why
            print(self.failure.report(self.raised()), file=sys.stderr, flush=True)
        self.failure, self._looked = None, time.time()
        started: dict[int, Any] = super()._start_workers(worker_group)
        _handle_signals(self)  # torch has just put its own handlers in place
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.failure = self.failure or self._first_failure(worker_group)
        if self.failure is not None and self._pcontext is not None:
            self._pcontext.close(signal.SIGTERM, _GRACE_SECONDS)  # torch would give the others 30 seconds
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _first_failure(self, worker_group: WorkerGroup) -> Failure | None:
        # A rank that died without a word did so after the last look, and brought down those that raised since.
        looked, self._looked = self._looked, time.time()
        failures = self.raised()
        said = {failure.pid for failure in failures}
        # One that has raised and hangs on its way out has failed too.
        ended = any(time.time() - failure.time > _GRACE_SECONDS for failure in failures)
        for local_rank, process in self._processes().items():
            returncode = process.poll()
            if returncode and process.pid not in said:
                rank = worker_group.workers[local_rank].global_rank
                failures.append(Failure(looked, rank, process.pid, returncode))
            ended = ended or bool(returncode)
        return min(failures, key=lambda failure: failure.time) if ended else None

    def raised(self) -> list[Failure]:
        """The ranks here that said why they failed, those still on their way out included."""
        failures = []
        for local_rank, process in self._processes().items():
            returncode = process.poll()
            said = read_failure(self._pcontext.error_files[local_rank]) if self._pcontext and returncode != 0 else None
            if said is not None:
                rank = self._worker_group.workers[local_rank].global_rank
                code = said.exit_code if returncode is None else returncode
                failures.append(Failure(said.time, rank, process.pid, code, said))
        return failures


def _run(agent: _Agent, handler: RendezvousHandler) -> int:
    _handle_signals(agent)
    try:
        result = agent.run()
    except SignalException as stop:
        for failure in agent.raised():  # a rank that could not stop in order
            if failure.message is not None:
                print(failure.report(), file=sys.stderr)
        print(f"paraflow launch: stopped by {stop.sigval.name}.", file=sys.stderr, flush=True)
        return 128 + int(stop.sigval)
    finally:
        agent.kill()
        if not agent.stopping:  # the other nodes may go on without a node that was stopped
            handler.shutdown()
    if result is None or not result.is_failed():
        return 0
    if agent.failure is None:
        raise LaunchError("The ranks stopped answering, and none of them said why.")
    print(agent.failure.report(agent.raised()), file=sys.stderr, flush=True)
    return exit_status(agent.failure.returncode)


def _handle_signals(agent: _Agent) -> None:
    for number in _STOP_SIGNALS:
        with contextlib.suppress(ValueError):  # not in the main thread: then no signal comes here
            signal.signal(number, agent.on_signal)


@contextlib.contextmanager
def _launcher_state(processes: int) -> Iterator[None]:
    """The threads per rank, torch's own reports silenced; all as before at the end, signal handlers too."""
    threads = os.environ.get("OMP_NUM_THREADS")
    handlers = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    silenced = logging.root.manager.disable
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    if "LOGLEVEL" not in os.environ:  # torch's own way to ask for the launcher's log
        logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(silenced)
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]
        for number, former in handlers.items():
            with contextlib.suppress(ValueError):
                signal.signal(number, former)
