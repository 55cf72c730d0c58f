"""Several hosts on one machine: network namespaces, joined by a bridge, with a limit to what each may send and receive.

    python benchmarks/hosts.py -n 4 --rate 1gbit examples/digits.py --quick

It runs the script under `paraflow launch`, with one launcher and one rank a host; the hosts share the cores of this
machine fairly. What host 0 says is shown as it comes; at the end, what each host has sent and received. It needs root
and Linux's `ip` and `tc`. Ctrl-C stops the script in order and takes the hosts away.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

_PREFIX = "pfh"  # names of interfaces have at most 15 letters, and a process id up to 7 of them
_SETTINGS = Path("/etc/netns")  # `ip netns exec NAME` puts the files of NAME in the place of those in /etc
_GRACE = 10.0
_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit")
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}


class HostsError(RuntimeError):
    """Hosts cannot be made here, or a script on them failed."""


def bits_per_second(rate: str) -> float:
    """Reads a rate as `tc` writes it.

    Raises:
        HostsError: It is none.

    Example:
        >>> bits_per_second("300mbit")
        300000000.0
    """
    found = _RATE.fullmatch(rate)
    if found is None:
        raise HostsError(f"The rate {rate!r} is none. Write a number with kbit, mbit or gbit, such as 1gbit.")
    return float(found[1]) * _UNITS[found[2]]


@dataclass(frozen=True)
class Run:
    """What came of a script.

    Attributes:
        status: The exit status: 0, or that of the first launcher that failed.
        seconds: From the first launcher's start to the last one's end.
        output: What host 0 wrote, lines of both streams as they came.
        sent: Bytes that each host sent, starting up included.
        received: Bytes that each host received.
    """

    status: int
    seconds: float
    output: str
    sent: tuple[int, ...]
    received: tuple[int, ...]


class Hosts:
    """Hosts 10.77.0.1, 10.77.0.2 ... for as long as the context lasts.

    Args:
        number: How many.
        rate: What a host may send, and as much it may receive, as `tc` writes it.

    Raises:
        HostsError: They cannot be made here; the sentence says why.

    Example:
        >>> with Hosts(2, "1gbit") as hosts:  # doctest: +SKIP
        ...     hosts.run(["train.py", "--steps", "10"]).sent
        (1534, 1187)
    """

    _ports = itertools.count(29500)

    def __init__(self, number: int, rate: str = "1gbit") -> None:
        bits_per_second(rate)
        if not 1 <= number <= 200:
            raise HostsError(f"{number} hosts cannot be made; write a number from 1 to 200.")
        self.number, self.rate = number, rate
        self._names = [f"{_PREFIX}{os.getpid()}-{host}" for host in range(number)]
        self._links = [f"{_PREFIX}{os.getpid()}v{host}" for host in range(number)]
        self._bridge = f"{_PREFIX}{os.getpid()}b"

    def __enter__(self) -> Hosts:
        _require_means()
        remove_left_over()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _make(self) -> None:
        _do(f"ip link add {self._bridge} type bridge")
        _do(f"ip link set {self._bridge} up")
        for host, (name, link) in enumerate(zip(self._names, self._links, strict=True)):
            self._name(name)
            _do(f"ip netns add {name}")
            _do(f"ip link add {link} type veth peer name eth0 netns {name}")
            _do(f"ip link set {link} master {self._bridge} up")
            _do(f"ip -n {name} addr add {self.address(host)}/24 dev eth0")
            _do(f"ip -n {name} link set eth0 up")
            _do(f"ip -n {name} link set lo up")
            # The burst is what a host may send at once: with less of it, a kernel of 100 Hz does not reach the rate.
            limit = f"root tbf rate {self.rate} burst 1mb latency 200ms"
            _do(f"tc qdisc add dev {link} {limit}")
            _do(f"tc -n {name} qdisc add dev eth0 {limit}")

    def _name(self, namespace: str) -> None:
        """Lets the hosts know each other by name: what looks an address up would ask, and wait for, a server."""
        folder = _SETTINGS / namespace
        folder.mkdir(parents=True, exist_ok=True)
        places = [(self.address(host), f"host{host}") for host in range(self.number)]
        lines = ["127.0.0.1 localhost", *(f"{ip} {name}\n::ffff:{ip} {name}" for ip, name in places)]
        (folder / "hosts").write_text("\n".join(lines) + "\n")

    def _remove(self) -> None:
        _remove_names(self._names, [self._bridge, *self._links])

    def address(self, host: int) -> str:
        """Returns the address of a host."""
        return f"10.77.0.{host + 1}"

    def traffic(self) -> list[tuple[int, int]]:
        """Returns the bytes that each host has sent and received since it was made."""
        # What the host's end of its cable sends, this end of it receives.
        folders = [Path("/sys/class/net", link, "statistics") for link in self._links]
        return [tuple(int((folder / f"{way}_bytes").read_text()) for way in ("rx", "tx")) for folder in folders]  # type: ignore[misc]

    def run(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        timeout: float = 600.0,
        show: bool = True,
    ) -> Run:
        """Runs a script on all hosts under `paraflow launch`, and returns when all have ended.

        Args:
            command: The script and its arguments.
            environment: Further variables.
            timeout: Seconds after which the script is ended.
            show: Whether what host 0 writes is shown as it comes.

        Raises:
            HostsError: It took too long.
        """
        before, began = self.traffic(), time.monotonic()
        port = next(self._ports)  # a fresh one, since the last run's may still be closing
        launchers = _Launchers(
            [self._start(host, port, command, environment or {}) for host in range(self.number)], show
        )
        try:
            status = launchers.wait(timeout)
        finally:
            launchers.end()
        used = [(now[0] - old[0], now[1] - old[1]) for now, old in zip(self.traffic(), before, strict=True)]
        return Run(
            status=status,
            seconds=time.monotonic() - began,
            output=launchers.output(0),
            sent=tuple(sent for sent, _ in used),
            received=tuple(received for _, received in used),
        )

    def _start(
        self, host: int, port: int, command: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        cores = sorted(os.sched_getaffinity(0))
        run = [sys.executable, "-c", "from paraflow.cli import main; main()", "launch", "-n", "1"]
        # "static" gives host i rank i, and has ranks meet at an address instead of by the machine's name.
        run += ["--nnodes", str(self.number), "--node-rank", str(host), "--rdzv-backend", "static"]
        run += ["--rdzv-endpoint", f"{self.address(0)}:{port}", "--grace", f"{_GRACE / 2:g}s", *command]
        own = cores[host % len(cores)]
        return subprocess.Popen(
            ["ip", "netns", "exec", self._names[host], "taskset", "-c", str(own), *run],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches the launchers through us, once
        )


class _Launchers:
    """The launchers of one run, and what they write."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]], show: bool) -> None:
        self._processes = processes
        self._lines: list[list[str]] = [[] for _ in processes]
        self._readers = [
            threading.Thread(target=_read, args=(process.stdout, lines, show and host == 0), daemon=True)
            for host, (process, lines) in enumerate(zip(processes, self._lines, strict=True))
        ]
        for reader in self._readers:
            reader.start()

    def output(self, host: int) -> str:
        """Returns what a host has written."""
        self._readers[host].join(5)
        return "".join(self._lines[host])

    def wait(self, timeout: float) -> int:
        """Waits for all; once one has failed, the others have a while to end by themselves.

        Raises:
            HostsError: They have not ended in time.
        """
        end, status, said = time.monotonic() + timeout, 0, False
        while any(process.poll() is None for process in self._processes):
            failed = [host for host, process in enumerate(self._processes) if process.poll()]
            if failed and not status:
                status = self._processes[failed[0]].returncode
                end = min(end, time.monotonic() + _GRACE)
            if time.monotonic() > end:
                if status:
                    break
                raise HostsError(f"The script has not ended within {timeout:g} seconds.\n{self.output(0)[-2000:]}")
            time.sleep(0.05)
        status = status or next((process.returncode for process in self._processes if process.returncode), 0)
        for host, process in enumerate(self._processes):
            if host and process.poll() and not said:
                said = True
                print(f"host {host} failed with status {process.returncode}:", file=sys.stderr)
                print(self.output(host)[-3000:], file=sys.stderr)
        return status

    def end(self) -> None:
        """Ends what is left: in order first, and then for good."""
        for number, seconds in ((signal.SIGINT, _GRACE), (signal.SIGKILL, 5.0)):
            left = [process for process in self._processes if process.poll() is None]
            for process in left:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            end = time.monotonic() + seconds
            for process in left:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end - time.monotonic()))


def _read(stream: IO[str], lines: list[str], show: bool) -> None:
    for line in stream:
        lines.append(line)
        if show:
            print(line, end="", flush=True)


def _require_means() -> None:
    """Refuses to begin where hosts cannot be made.

    Raises:
        HostsError: This is not Linux, not root, or a program is missing.
    """
    if sys.platform != "linux":
        raise HostsError(f"Hosts are made of Linux's network namespaces, and this is {sys.platform}.")
    missing = [program for program in ("ip", "tc", "taskset") if shutil.which(program) is None]
    if missing:
        raise HostsError(
            f"There is no program {' or '.join(missing)} here. Install iproute2 (ip, tc) and util-linux (taskset)."
        )
    if os.geteuid() != 0:
        raise HostsError("Making network namespaces needs root. Run it with sudo, or in a container with NET_ADMIN.")


def remove_left_over() -> None:
    """Removes the hosts of processes that were killed before they could do it."""
    namespaces = [line.split()[0] for line in _do("ip netns list").splitlines() if line]
    links = [line.split(":")[1].strip().split("@")[0] for line in _do("ip -o link").splitlines()]
    mine = re.compile(rf"{_PREFIX}(\d+)(-\d+|v\d+|b)")
    dead = {name for name in (*namespaces, *links) if (found := mine.fullmatch(name)) and not _lives(int(found[1]))}
    _remove_names([name for name in namespaces if name in dead], [name for name in links if name in dead])


def _lives(process: int) -> bool:
    return Path("/proc", str(process)).exists()


def _remove_names(namespaces: Sequence[str], links: Sequence[str]) -> None:
    """Ends what runs in namespaces, and removes them and links; what is gone already is no error."""
    for name in namespaces:
        found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
        for process in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        shutil.rmtree(_SETTINGS / name, ignore_errors=True)
    for link in links:
        subprocess.run(["ip", "link", "del", link], capture_output=True, check=False)


def _do(command: str) -> str:
    """Runs a command.

    Raises:
        HostsError: It failed.
    """
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise HostsError(f"Hosts could not be made: `{command}` said: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def warn_if_busy() -> None:
    """Says so where other programs use the cores that the hosts share: what is measured then is too long."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > 0.3 * cores:
        print(
            f"Other programs run (load {load:.1f} on {cores} cores): seconds will be too long, and ratios wrong.",
            file=sys.stderr,
        )


def in_bytes(number: float) -> str:
    """Returns bytes in words.

    Example:
        >>> in_bytes(204800000)
        '204.8 MB'
    """
    return f"{number / 1e6:,.1f} MB"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--hosts", type=int, default=2, help="how many hosts (default 2)")
    parser.add_argument("--rate", default="1gbit", help="what each may send and receive (default 1gbit)")
    parser.add_argument(
        "--timeout", type=float, default=3600.0, help="seconds until the script is ended (default 3600)"
    )
    parser.add_argument("script", help="the script to run on them")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")
    return parser.parse_args()


def main() -> int:
    """Returns the script's status."""
    arguments = _parse()
    # An end that is asked for runs the same clean-up as Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with Hosts(arguments.hosts, arguments.rate) as hosts:
            run = hosts.run([arguments.script, *arguments.arguments], timeout=arguments.timeout)
    except HostsError as error:
        print(f"hosts: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    for host, (sent, received) in enumerate(zip(run.sent, run.received, strict=True)):
        print(f"host {host} ({hosts.address(host)}): sent {in_bytes(sent)}, received {in_bytes(received)}")
    print(f"{run.seconds:.1f} seconds, starting included, at {hosts.rate}")
    return run.status


if __name__ == "__main__":
    sys.exit(main())
