"""What is wrong, if anything: one function a part of the facts, each finding a sentence with its remedy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Facts = Mapping[str, Any]
_MIB, _GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Finding:
    """Something that is wrong: an error breaks a run, a warning slows it down or will break it one day."""

    severity: Literal["error", "warning"]
    sentence: str
    remedy: str

    def as_dict(self) -> dict[str, str]:
        """The finding as it is written to JSON."""
        return asdict(self)


def find(ranks: Sequence[Facts]) -> list[Finding]:
    """Everything that is wrong with the facts of all ranks, errors first; a finding that ranks share stands once.

    Args:
        ranks: What `paraflow.doctor.examination` found on each rank, in order of rank.
    """
    found = [finding for look in _LOOKS for finding in look(ranks)]
    once = list(dict.fromkeys(found))
    return sorted(once, key=lambda finding: finding.severity)


def _hosts(ranks: Sequence[Facts]) -> list[Facts]:
    """The facts of one rank of each host."""
    return list({facts["hostname"]: facts for facts in reversed(ranks)}.values())[::-1]


def _environment(ranks: Sequence[Facts]) -> Iterator[Finding]:
    for facts in ranks:
        names = facts.get("environment_outside", facts["environment"])
        place = {"RANK", "WORLD_SIZE"} & names.keys()
        if len(place) == 1:
            (there,) = place
            (lacking,) = {"RANK", "WORLD_SIZE"} - place
            yield Finding(
                "error",
                f"The environment has {there} but no {lacking}, so a process does not know its place in the run.",
                f"Unset {there} for a run of one process, or start with `paraflow launch`, which sets both.",
            )
        if names.get("WORLD_SIZE", "1") != "1" and not {"MASTER_ADDR", "MASTER_PORT"} <= names.keys():
            yield Finding(
                "error",
                f"The environment has WORLD_SIZE={names['WORLD_SIZE']} but not both MASTER_ADDR and MASTER_PORT: ranks "
                "cannot meet.",
                "Start with `paraflow launch` or `torchrun`, or set both to the host of rank 0 and a free port.",
            )


def _versions(ranks: Sequence[Facts]) -> Iterator[Finding]:
    for name in ranks[0]["versions"]:
        found: dict[str | None, list[int]] = {}
        for facts in ranks:
            found.setdefault(facts["versions"][name], []).append(facts["rank"])
        if len(found) > 1:
            places = ", ".join(f"{version} on {_ranks(where)}" for version, where in found.items())
            yield Finding(
                "error" if name in ("paraflow", "torch", "cuda", "nccl") else "warning",
                f"The ranks have different versions of {name}: {places}.",
                "Install the same versions on every host, for example from one lock file or one image.",
            )


def _software(ranks: Sequence[Facts]) -> Iterator[Finding]:
    for facts in _hosts(ranks):
        host, cuda = facts["hostname"], facts["versions"]["cuda"]
        if facts["nvidia_driver"] and cuda is None and not facts["devices"]:
            yield Finding(
                "error",
                f"{host} has an NVIDIA driver, but torch {facts['versions']['torch']} is built without CUDA.",
                "Install a CUDA build of torch: its page pytorch.org/get-started says which for this driver.",
            )
        elif facts["nvidia_driver"] and not facts["devices"]:
            yield Finding(
                "error",
                f"{host} has an NVIDIA driver and torch is built for CUDA {cuda}, but torch sees no device.",
                "Look at nvidia-smi and CUDA_VISIBLE_DEVICES, and whether the driver is new enough for this CUDA.",
            )
        if cuda is not None and facts["devices"] and not facts["backends"]["nccl"]:
            yield Finding(
                "error",
                f"{host} has CUDA devices, but torch is built without NCCL.",
                "Install a build of torch with NCCL; the official ones for Linux have it.",
            )
        if facts["unrelated_apex"]:
            yield Finding(
                "warning",
                "The installed package `apex` is PyPI's, which has nothing to do with NVIDIA's Apex.",
                "Run `pip uninstall apex`; NVIDIA's is built from its repository, and torch has most of it by now.",
            )
        if facts["devices"] and facts["local_world_size"] > len(facts["devices"]):
            yield Finding(
                "error",
                f"{host} has {facts['local_world_size']} ranks for {len(facts['devices'])} devices.",
                f"Start at most -n {len(facts['devices'])} there.",
            )


def _cores(ranks: Sequence[Facts]) -> Iterator[Finding]:
    for facts in _hosts(ranks):
        local, cores, threads = facts["local_world_size"], facts["cores"], facts["threads"]
        if not facts["devices"] and local > cores:
            yield Finding(
                "warning",
                f"{facts['hostname']} has {local} ranks that compute on {cores:g} cores.",
                f"Start at most -n {max(1, int(cores))} there.",
            )
        elif threads * local > cores + 0.5 and threads > 1:
            yield Finding(
                "warning",
                f"{local} ranks of {threads} threads each want more than the {cores:g} cores of {facts['hostname']}.",
                f"Set OMP_NUM_THREADS={max(1, int(cores // local))}.",
            )


def _limits(ranks: Sequence[Facts]) -> Iterator[Finding]:
    for facts in _hosts(ranks):
        host, shared, files, disk = facts["hostname"], facts["shared_memory"], facts["open_files"], facts.get("disk")
        if shared is not None and shared["free"] < 512 * _MIB:
            yield Finding(
                "warning",
                f"/dev/shm of {host} has {shared['free'] / _MIB:.0f} MiB free; loader workers pass batches through it "
                "and die with a bus error when it is full.",
                "Enlarge it (docker run --shm-size=8g, or --ipc=host), or load with num_workers=0.",
            )
        if files is not None and files < 1024:
            yield Finding(
                "warning",
                f"A process on {host} may open {files} files; loader workers and sockets soon need more.",
                "Run `ulimit -n 65536` before, or raise it in limits.conf.",
            )
        limits = [facts["memory"][name] for name in ("available", "limit") if facts["memory"][name] is not None]
        if limits and min(limits) < _GIB:
            yield Finding(
                "warning",
                f"{host} has {min(limits) / _MIB:.0f} MiB of memory for all ranks.",
                "End other programs, or raise the container's memory limit.",
            )
        if disk is not None:
            yield from _disk(host, disk)


def _disk(host: str, disk: Facts) -> Iterator[Finding]:
    if "error" in disk:
        yield Finding(
            "error",
            f"{host} cannot write in {disk['folder']}: {disk['error']}.",
            "Start where checkpoints can be written, or free space.",
        )
    elif "free" in disk and (disk["free"] < 2 * _GIB or disk["free"] < 0.02 * disk["total"]):
        yield Finding(
            "warning",
            f"The disk of {disk['folder']} on {host} is nearly full: {disk['free'] / _GIB:.1f} GiB are free.",
            "Free space, or write checkpoints elsewhere.",
        )


def _network(ranks: Sequence[Facts]) -> Iterator[Finding]:
    if len(_hosts(ranks)) == 1:
        return
    for facts in _hosts(ranks):
        address, host = facts["address"], facts["hostname"]
        if (address is None or address.startswith("127.")) and "GLOO_SOCKET_IFNAME" not in facts["environment"]:
            place = f"resolves to {address}" if address else "resolves to no address"
            yield Finding(
                "error",
                f"The name {host} {place} on its own host, where the other hosts cannot reach it.",
                "Give it its network address in /etc/hosts, or set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the "
                f"interface: {', '.join(name for name in facts['interfaces'] if name != 'lo')}.",
            )


def _clocks(ranks: Sequence[Facts]) -> Iterator[Finding]:
    for facts in ranks:
        offset, error = facts.get("clock") or (0.0, 0.0)
        if abs(offset) - error > 1:
            yield Finding(
                "error" if abs(offset) > 4 else "warning",
                f"The clock of {facts['hostname']} differs from that of rank 0 by {offset:+.1f} seconds; nodes whose "
                "clocks differ by 5 seconds take each other for lost.",
                "Let both follow a time server (chrony or ntpd).",
            )


def _collectives(ranks: Sequence[Facts]) -> Iterator[Finding]:
    for facts in ranks:
        measured = facts.get("measured") or {}
        if "error" in measured:
            yield Finding(
                "error",
                f"Rank {facts['rank']} ({facts['hostname']}) could not take part in the collectives: "
                f"{measured['error']}",
                "See that the hosts reach each other on all ports, and that GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME "
                "name the right interface; NCCL_DEBUG=INFO says more.",
            )
        wrong = [str(row["bytes"]) for row in measured.get("all_reduce", ()) if not row["right"]]
        if wrong:
            yield Finding(
                "error",
                f"Rank {facts['rank']} ({facts['hostname']}) got wrong sums of {', '.join(wrong)} bytes.",
                "Do not train here: test the memory and the network, and try NCCL_P2P_DISABLE=1 on GPUs.",
            )
    yield from _slow(ranks, "compute", "computes", "FLOP/s", "Look for other programs and for cores or clocks held low")
    yield from _slow(ranks, "exchange", "exchanges with its neighbours", "B/s", "Look at its network and its cables")
    yield from _bandwidth(ranks)


def _slow(ranks: Sequence[Facts], what: str, does: str, unit: str, remedy: str) -> Iterator[Finding]:
    speeds = {facts["rank"]: (facts.get("measured") or {}).get(what) for facts in ranks}
    known = {rank: speed for rank, speed in speeds.items() if speed is not None}
    if not known:
        return
    usual = statistics.median_high(known.values())
    for rank, speed in known.items():
        if speed < 0.4 * usual:
            yield Finding(
                "warning",
                f"Rank {rank} ({ranks[rank]['hostname']}) {does} at {speed / 1e9:.2g} G{unit}, the others at about "
                f"{usual / 1e9:.2g} G{unit}; all wait for it.",
                f"{remedy} on that host.",
            )


def _bandwidth(ranks: Sequence[Facts]) -> Iterator[Finding]:
    measured = ranks[0].get("measured") or {}
    rows = all_reduce_table(ranks)
    if not rows or (len(_hosts(ranks)) == 1 and measured.get("device") != "cuda"):
        return
    best = max(row["bus"] for row in rows)
    if len(_hosts(ranks)) == 1:
        if best < 2e9:
            yield Finding(
                "warning",
                f"The devices of this host sum at {best / 1e9:.2g} GB/s, less than any PCI Express link carries.",
                "Look at `nvidia-smi topo -m`, and unset NCCL_P2P_DISABLE and NCCL_SHM_DISABLE.",
            )
        return
    links = {name: ranks[0]["interfaces"].get(name, {}).get("speed") for name in ranks[0].get("used_interfaces", ())}
    for name, speed in links.items():
        if speed and best < 0.25 * speed * 1e6 / 8:
            yield Finding(
                "warning",
                f"Sums over {name} reach {best / 1e9:.2g} GB/s, and its link carries {speed / 8000:.2g} GB/s.",
                "See that no other program uses it, and that a faster interface is not meant (GLOO_SOCKET_IFNAME).",
            )


def all_reduce_table(ranks: Sequence[Facts]) -> list[dict[str, Any]]:
    """For each size: bytes, the seconds of the slowest rank, and from them the algorithm and bus bandwidth in B/s.

    The bus bandwidth is that of the algorithm times 2 (n - 1) / n, which is what each of n ranks must send and receive
    at least (as in NVIDIA's nccl-tests), so that it can be compared with the link's.
    """
    tables = [(facts.get("measured") or {}).get("all_reduce") for facts in ranks]
    rows = []
    for same in zip(*(table for table in tables if table is not None), strict=True):
        seconds = max(row["seconds"] for row in same)
        algorithm = same[0]["bytes"] / seconds
        bus = algorithm * 2 * (len(ranks) - 1) / len(ranks)
        right = all(row["right"] for row in same)
        rows.append({**same[0], "seconds": seconds, "algorithm": algorithm, "bus": bus, "right": right})
    return rows


def _ranks(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(map(str, numbers[:8]))}{', ...' if len(numbers) > 8 else ''}"


_LOOKS: tuple[Callable[[Sequence[Facts]], Iterator[Finding]], ...] = (
    _environment,
    _versions,
    _software,
    _cores,
    _limits,
    _network,
    _clocks,
    _collectives,
)
