"""Torch's elastic agent, told apart: a rank that fails, a rank that stops in order, and a launcher that is stopped."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from datetime import timedelta
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from paraflow.launch.failure import Failure
from paraflow.launch.processes import FAILURE_SECONDS, Processes, listens

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
_LAST_CALL_AGAIN = timedelta(seconds=5)  # the nodes that are left come at about the same time


class Agent(LocalElasticAgent):
    """Torch's agent, that remembers how the ranks of this node ended.

    Attributes:
        failure: The rank that failed first, if one did.
        stopped: The signal at which the ranks stopped in order by themselves: one of them was sent it.
        stopping: Whether a signal has asked this launcher to stop.
        ranks: The processes of the ranks.
    """

    def __init__(self, spec: WorkerSpec, logs: LogsSpecs, grace: float) -> None:
        super().__init__(spec, logs)
        self.grace = grace
        self.failure: Failure | None = None
        self.stopped: signal.Signals | None = None
        self.stopping = False
        self.ranks = Processes()
        self._passed: set[int] = set()
        self._looked = 0.0
        self._under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Stop the ranks at the first signal, kill them at the second."""
        if self.stopping:
            self.ranks.kill()
            return
        self.stopping = True
        raise SignalException(f"stopped by signal {number}", signal.Signals(number))

    def on_passed_signal(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on to the ranks, each as soon as it has a handler for it, and go on."""
        self._passed.add(number)
        self.ranks.again(number)

    def handle_signals(self) -> None:
        """Have the signals of this process come here; SIGHUP stays ignored where it was, as under nohup."""
        with contextlib.suppress(ValueError):  # not in the main thread: then no signal comes here
            for number in STOP_SIGNALS:
                ignored = number == signal.SIGHUP and self._under_nohup
                signal.signal(number, signal.SIG_IGN if ignored else self.on_signal)
            for number in PASSED_SIGNALS:
                signal.signal(number, self.on_passed_signal)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        handler = worker_group.spec.rdzv_handler
        if isinstance(handler, DynamicRendezvousHandler):
            # Torch keeps one store for all rounds: ranks that start anew would find the addresses of the former ones
            # in it, and a node would look for it where the node that is lost had it.
            handler._bootstrap_store_info = None
            handler._shared_tcp_store_server = None
        super()._rendezvous(worker_group)
        if isinstance(handler, DynamicRendezvousHandler):
            timeout = handler.settings.timeout
            timeout._set_timeouts(last_call=min(timeout.last_call, _LAST_CALL_AGAIN))

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self.failure is not None:  # the ranks are started anew, and nothing else tells why
            print(self.failure.report(self.raised()), file=sys.stderr, flush=True)
        self.failure, self._looked = None, time.time()
        self._passed.clear()  # it was for the ranks before these
        self.ranks = Processes()
        started: dict[int, Any] = super()._start_workers(worker_group)
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        processes: dict[int, subprocess.Popen[bytes]] = {rank: handler.proc for rank, handler in handlers.items()}
        self.ranks = Processes(processes, self._pcontext.error_files if self._pcontext else {})
        self.handle_signals()  # torch has just put its own handlers in place
        return started

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(signal.SIGTERM, self.grace)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float | None = None) -> None:
        # SIGINT and SIGTERM are what a rank saves at; a terminal that closes asks for no less.
        number = death_sig if death_sig == signal.SIGINT else signal.SIGTERM
        self.ranks.end(number, self.grace)
        super()._shutdown(death_sig)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._pass_on()
        self.failure = self.failure or self._first_failure()
        if self.failure is None and any(map(self.ranks.stopped, self.ranks.processes)):
            self._let_all_stop()
        elif self.failure is not None:
            self.ranks.end(signal.SIGTERM, FAILURE_SECONDS)  # torch would kill the others at once
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _pass_on(self) -> None:
        for number in list(self._passed):
            self.ranks.pass_on(number)

    def _let_all_stop(self) -> None:
        """A rank has stopped in order: the others have agreed to, and are given the time to do so too."""
        deaf = time.monotonic() + FAILURE_SECONDS
        first = min(filter(lambda failure: failure.stop, self.raised()), key=lambda failure: failure.time)

        def look() -> None:
            nonlocal deaf
            self._pass_on()
            if time.monotonic() > deaf:  # such ranks cannot have agreed to anything
                deaf = float("inf")
                pids = {rank: self.ranks.processes[rank].pid for rank in self.ranks.alive()}
                silent = [rank for rank in pids if self.ranks.said(rank) is None]
                self.ranks.ask(signal.SIGTERM, [rank for rank in silent if not listens(pids[rank], signal.SIGTERM)])

        self.ranks.wait(self.grace, look)
        self.ranks.late += self.ranks.alive()
        self.ranks.kill()
        self._remaining_restarts = 0
        self.failure = self._first_failure()
        if self.failure is None and any(self.ranks.ended_for(rank) for rank in self._not_late()):
            self.failure = first
        if self.failure is None:
            self.stopped = first.stop

    def _not_late(self) -> list[int]:
        return [rank for rank in self.ranks.processes if rank not in self.ranks.late]

    def _first_failure(self) -> Failure | None:
        # A rank that died without a word did so after the last look, and brought down those that raised since.
        looked, self._looked = self._looked, time.time()
        failures = [failure for failure in self.raised() if not failure.stop]
        said = {failure.pid for failure in failures}
        # One that has raised and hangs on its way out has failed too.
        ended = any(time.time() - failure.time > FAILURE_SECONDS for failure in failures)
        for local_rank, process in self.ranks.processes.items():
            if self.ranks.fell(local_rank):
                ended = True
                if process.pid not in said:
                    failures.append(Failure(looked, self._global(local_rank), process.pid, process.returncode))
        return min(failures, key=lambda failure: failure.time) if ended else None

    def raised(self) -> list[Failure]:
        """The ranks here that said why they failed, those still on their way out included."""
        failures = []
        for local_rank, process in self.ranks.processes.items():
            returncode = process.poll()
            said = self.ranks.said(local_rank) if returncode != 0 else None
            if said is not None:
                code = said.exit_code if returncode is None else returncode
                stop = self.ranks.stopped(local_rank)
                failures.append(Failure(said.time, self._global(local_rank), process.pid, code, said, stop))
        return failures

    def late(self) -> list[int]:
        """The ranks here that did not stop in time, and were killed."""
        return [self._global(local_rank) for local_rank in self.ranks.late]

    def _global(self, local_rank: int) -> int:
        return int(self._worker_group.workers[local_rank].global_rank)
