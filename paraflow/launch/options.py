"""What `paraflow launch` is asked for, and what torch's elastic launcher is told of it."""

from __future__ import annotations

import os
import re
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.rendezvous import RendezvousParameters

from paraflow.errors import LaunchError

# A node is taken for lost after 5 heartbeats of 1 second (torch: 3 of 5), so that the others go on soon.
_RENDEZVOUS = {"keep_alive_interval": "1", "keep_alive_max_attempt": "5", "last_call_timeout": "30"}
_SECONDS = {"": 1, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600}


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
        rendezvous_settings: Torch's settings of the rendezvous, "key=value,key=value", such as "last_call_timeout=60".
        max_restarts: How often all ranks are started anew after one has failed.
        grace: The seconds that ranks have to stop in order (and to save), before they are killed.
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
    rendezvous_settings: str = ""
    max_restarts: int = 0
    grace: float = 60.0
    module: bool = False


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


def grace_seconds(text: str) -> float:
    """The seconds that `--grace` says: a number of seconds, or one with its unit.

    Raises:
        LaunchError: It is neither.

    Example:
        >>> grace_seconds("90"), grace_seconds("2min"), grace_seconds("0")
        (90.0, 120.0, 0.0)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text)
    if found is None or found[2] not in _SECONDS:
        raise LaunchError(f"--grace {text} is no time. Write seconds, such as 90, or 90s, 2min or 1h.", 2)
    return float(found[1]) * _SECONDS[found[2]]


def check_options(options: LaunchOptions) -> None:
    """Refuses a script that is not there, and numbers that make no sense.

    Raises:
        LaunchError: With exit code 2.
    """
    if options.max_restarts < 0:
        raise LaunchError(f"--max-restarts {options.max_restarts} is below 0. Write 0 to fail at the first failure.", 2)
    if not options.grace >= 0:
        raise LaunchError(f"--grace {options.grace:g} is below 0. Write the seconds that ranks have to save.", 2)
    if options.module or Path(options.script).is_file():
        return
    if Path(options.script).is_dir() and Path(options.script, "__main__.py").is_file():
        return
    raise LaunchError(
        f"There is no script {options.script!r} in {Path.cwd()}. Write the path of a Python file, or -m and a module.",
        2,
    )


def rendezvous_parameters(options: LaunchOptions) -> RendezvousParameters:
    """How and where the nodes of the run meet.

    Raises:
        LaunchError: The number of nodes, the endpoint or a setting makes no sense (exit code 2).
    """
    found = re.fullmatch(r"(\d+)(?::(\d+))?", options.nodes)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise LaunchError(f"--nnodes {options.nodes} is no number of nodes. Write a number, or MIN:MAX such as 1:4.", 2)
    endpoint = options.rendezvous_endpoint
    if most == 1 and not endpoint:
        # Port 0: the launcher's own store takes a free port, so two launches on one host cannot meet by accident.
        return RendezvousParameters("c10d", "localhost:0", uuid.uuid4().hex, 1, 1, local_addr="127.0.0.1")
    if not endpoint:
        raise LaunchError(f"--nnodes {options.nodes} needs --rdzv-endpoint host:port, the same on every node.", 2)
    more: dict[str, Any] = {"timeout": 900, **_settings(options)}
    if options.rendezvous_backend == "static":
        if options.node_rank is None or least != most or not re.search(r":\d+$", endpoint):
            raise LaunchError(
                "--rdzv-backend static needs --node-rank, one --nnodes number, and the endpoint's port.", 2
            )
        more["rank"] = options.node_rank
    elif options.node_rank is not None:
        more["is_host"] = options.node_rank == 0
    # Where the nodes meet on this host only, its name may resolve to an address that nothing listens on.
    local = "127.0.0.1" if re.fullmatch(r"(127\.0\.0\.1|localhost)(:\d+)?", endpoint) else None
    return RendezvousParameters(
        options.rendezvous_backend, endpoint, options.rendezvous_id, least, most, local_addr=local, **more
    )


def _settings(options: LaunchOptions) -> dict[str, str]:
    settings = dict(_RENDEZVOUS) if options.rendezvous_backend == "c10d" else {}
    for word in filter(None, options.rendezvous_settings.split(",")):
        key, sign, value = (part.strip() for part in word.partition("="))
        if not (key and sign and value):
            raise LaunchError(f"--rdzv-conf has {word!r}. Write key=value, such as last_call_timeout=60.", 2)
        settings[key] = value
    return settings
