"""What one rank sees of its machine: cores, memory, disk, open files, network interfaces."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_MEBIBYTE = 1 << 20


def host_facts() -> dict[str, Any]:
    """The facts of this host and process: numbers, texts, lists and dicts only. Sizes are bytes, None is unknown."""
    cores, memory = usable_cores(), memory_facts()
    return {
        "hostname": socket.gethostname(),
        "address": _address_of_host(),
        "system": platform.platform(),
        "cores": cores,
        "cores_of_host": os.cpu_count(),
        "memory": memory,
        "shared_memory": _disk_usage("/dev/shm"),
        "open_files": _open_files(),
        "interfaces": interfaces(),
    }


def usable_cores() -> float:
    """The cores this process may use: of its affinity, and no more than its control group's quota."""
    cores = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else float(os.cpu_count() or 1)
    for group in _control_groups("cpu"):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (group / "cpu.max").read_text().split()
            cores = min(cores, int(quota) / int(period))
        with contextlib.suppress(OSError, ValueError):
            quota_us = int((group / "cpu.cfs_quota_us").read_text())
            if quota_us > 0:
                cores = min(cores, quota_us / int((group / "cpu.cfs_period_us").read_text()))
    return cores


def memory_facts() -> dict[str, int | None]:
    """Bytes of memory: in all, available, and what the control group allows (None: no limit)."""
    numbers: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            numbers[name] = int(rest.split()[0]) * 1024
    total = numbers.get("MemTotal")
    limits = []
    for group in _control_groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                limits.append(int((group / name).read_text()))
    limit = min(limits, default=None)
    if limit is not None and total is not None and limit >= total:
        limit = None
    return {"total": total, "available": numbers.get("MemAvailable"), "limit": limit}


def _control_groups(controller: str) -> Iterable[Path]:
    """The folders of this process's control groups and of the groups around them, in either version."""
    root = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            top = root / controller if controllers else root
            inner = top / place.lstrip("/")
            yield from (folder for folder in (inner, *inner.parents) if folder == top or top in folder.parents)


def _disk_usage(path: str) -> dict[str, int] | None:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return {"total": usage.total, "free": usage.free}


def _open_files() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _address_of_host() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def interfaces() -> dict[str, dict[str, Any]]:
    """The network interfaces by name: the IPv4 address, and the speed of the link in Mbit/s where it is known."""
    found: dict[str, dict[str, Any]] = {}
    for _, name in socket.if_nameindex():
        speed = None
        with contextlib.suppress(OSError, ValueError):
            speed = int(Path("/sys/class/net", name, "speed").read_text())
        found[name] = {"address": _address(name), "speed": speed if speed and speed > 0 else None}
    return found


def _address(name: str) -> str | None:
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            answer = fcntl.ioctl(asking.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
        return socket.inet_ntoa(answer[20:24])
    except (ImportError, OSError):
        return None


def connected_interfaces(store_port: int | None) -> list[str]:
    """The interfaces over which this process is connected with others, those to the store's port left out (Linux)."""
    inodes = set()
    with contextlib.suppress(OSError):
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    addresses = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
                words = line.split()
                port = int(words[2].split(":")[1], 16)
                if words[3] == "01" and words[9] in inodes and port != store_port:  # 01: established
                    address = words[1].split(":")[0][-8:]  # of a mapped address, the IPv4 part
                    addresses.add(socket.inet_ntoa(bytes.fromhex(address)[::-1]))
    by_address = {facts["address"]: name for name, facts in interfaces().items()}
    return sorted({by_address.get(address, "lo" if address.startswith("127.") else address) for address in addresses})


def disk_facts(size: int = 64 * _MEBIBYTE) -> dict[str, Any]:
    """The current folder as checkpoints find it: free bytes, and bytes a second of a file that is written and synced.

    Args:
        size: The bytes that are written.
    """
    folder = os.getcwd()
    facts: dict[str, Any] = {"folder": folder, **(_disk_usage(folder) or {})}
    block = os.urandom(_MEBIBYTE)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".paraflow-doctor-") as file:
            begin = time.perf_counter()
            for _ in range(max(1, size // _MEBIBYTE)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            facts["write"] = max(1, size // _MEBIBYTE) * _MEBIBYTE / (time.perf_counter() - begin)
            begin = time.perf_counter()
            file.write(block[:4096])
            file.flush()
            os.fsync(file.fileno())
            facts["sync_seconds"] = time.perf_counter() - begin
    except OSError as error:
        facts["error"] = f"{error.strerror} (errno {error.errno})"
    return facts
