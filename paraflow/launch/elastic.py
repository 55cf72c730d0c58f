"""`paraflow launch`: torch's elastic launcher, with the exit code and the traceback of the rank that failed first."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from paraflow.errors import LaunchError
from paraflow.launch.agent import PASSED_SIGNALS, STOP_SIGNALS, Agent
from paraflow.launch.options import LaunchOptions, check_options, local_processes, rendezvous_parameters
from paraflow.launch.spawn import WORKER
from paraflow.launch.worker import exit_status

__all__ = ["LaunchOptions", "launch", "local_processes"]


def launch(options: LaunchOptions) -> int:
    """Run a script as the ranks of a run, and wait for them.

    A rank that fails ends all ranks within seconds. Ranks print no traceback of their own: the first failure is the
    last thing printed, to stderr, after one line for each rank here that failed with another message. An error that
    Paraflow raised on purpose is its sentence alone; PARAFLOW_TRACEBACK=1 in the environment adds the traceback.

    A signal that asks this process to stop (SIGINT, SIGTERM, SIGHUP, SIGQUIT) reaches the ranks' own processes first,
    which have `grace` seconds to save; a second one kills them. Where ranks stop in order by themselves, with
    KeyboardInterrupt or `SystemExit(128 + signal)`, because one of them was sent a signal, the others have as long, and
    nothing is started anew. SIGUSR1 and SIGUSR2 are passed on to each rank that has a handler for them.

    A node that is lost (c10d, `--nnodes MIN:MAX`, `max_restarts` of at least 1) is noticed after 5 seconds, and the
    others start their ranks anew without it. The node that hosts the rendezvous cannot be lost: the run ends.

    Returns:
        0, or the exit status of the rank that failed first (128 + the number of the signal that killed it), or
        128 + the number of the signal that stopped this process or its ranks.

    Raises:
        LaunchError: The script does not exist, an option makes no sense (exit code 2), or the nodes did not meet.
    """
    processes = local_processes(options.processes)
    parameters = rendezvous_parameters(options)
    check_options(options)
    with _launcher_state(processes), tempfile.TemporaryDirectory(prefix="paraflow-launch-") as logs:
        agent: Agent | None = None
        try:
            handler = get_rendezvous_handler(parameters)
            spec = _worker_spec(options, processes, parameters, handler)
            agent = Agent(spec, DefaultLogsSpecs(log_dir=logs), options.grace)
            return _run(agent, handler)
        except RendezvousError as error:
            place = options.rendezvous_endpoint or "this host"
            if agent is not None and agent.ranks.processes:
                _print_failure(agent)
                if isinstance(error, RendezvousConnectionError):
                    raise LaunchError(
                        f"The node that hosts the rendezvous at {place} is gone, and the run with it. Start the run "
                        'again on the nodes there are; fit(resume="auto") carries on from the last checkpoint.'
                    ) from error
                raise LaunchError(f"The nodes that are left could not meet again at {place}: {error}") from error
            raise LaunchError(f"The nodes of the run could not meet at {place}: {error}") from error


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


def _run(agent: Agent, handler: RendezvousHandler) -> int:
    agent.handle_signals()
    try:
        result = agent.run()
    except SignalException as stop:
        for failure in agent.raised():  # a rank that could not stop in order
            if failure.message is not None:
                print(failure.report(), file=sys.stderr)
        return _say_stopped(agent, stop.sigval)
    finally:
        agent.ranks.kill()
        if not agent.stopping:  # the other nodes may go on without a node that was stopped
            handler.shutdown()
    if agent.stopped is not None:
        return _say_stopped(agent, agent.stopped)
    if result is None or not result.is_failed():
        return 0
    if agent.failure is None:
        raise LaunchError("The ranks stopped answering, and none of them said why.")
    _print_failure(agent)
    return exit_status(agent.failure.returncode)


def _print_failure(agent: Agent) -> None:
    if agent.failure is not None:
        print(agent.failure.report(agent.raised()), file=sys.stderr, flush=True)


def _say_stopped(agent: Agent, number: signal.Signals) -> int:
    for rank in agent.late():
        print(f"rank {rank} did not stop within {agent.grace:g} seconds, and was killed.", file=sys.stderr)
    print(f"paraflow launch: stopped by {number.name}.", file=sys.stderr, flush=True)
    return 128 + int(number)


@contextlib.contextmanager
def _launcher_state(processes: int) -> Iterator[None]:
    """The threads per rank, torch's own reports silenced; all as before at the end, signal handlers too."""
    threads = os.environ.get("OMP_NUM_THREADS")
    handlers = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, *PASSED_SIGNALS)}
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
