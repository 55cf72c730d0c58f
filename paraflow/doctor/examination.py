"""The examination that every rank of a run takes part in."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from paraflow.doctor.findings import find
from paraflow.doctor.host import connected_interfaces, disk_facts, host_facts
from paraflow.doctor.measure import clock_offset, measure
from paraflow.doctor.software import software_facts
from paraflow.errors import PlanError
from paraflow.launch.environment import local_rank, local_world_size, rank, world_size
from paraflow.mesh import choose_device, shutdown

_PATIENCE = timedelta(seconds=60)


def examine() -> list[dict[str, Any]]:
    """Gathers the facts of every rank; all ranks of the run must call it, outside a process group.

    Facts travel over the store, so they arrive even where collectives do not.

    Returns:
        The facts of each rank, in order of rank: dicts of numbers, texts, lists and dicts, the same on every rank.

    Raises:
        LaunchError: An environment variable that says this process's place is malformed.
    """
    facts: dict[str, Any] = {"rank": rank(), "local_rank": local_rank(), "local_world_size": local_world_size()}
    facts.update(host_facts(), **software_facts())
    if facts["local_rank"] == 0:
        facts["disk"] = disk_facts()
    names = facts["environment"]
    if world_size() == 1 or not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= names.keys():
        return [facts]
    try:
        store, _, _ = next(rendezvous("env://", timeout=_PATIENCE))
    except (RuntimeError, OSError) as error:
        place = f"{names['MASTER_ADDR']}:{names['MASTER_PORT']}"
        facts["measured"] = {"error": f"there is no store at {place} ({str(error).splitlines()[0]})"}
        return [facts]
    facts["measured"] = _measure(dist.PrefixStore("doctor/group", store))  # type: ignore[attr-defined]
    facts["used_interfaces"] = connected_interfaces(int(names["MASTER_PORT"]))
    asking = dist.PrefixStore("doctor", store)  # type: ignore[attr-defined]
    facts["clock"] = clock_offset(asking, rank(), world_size())
    gathered = _exchange(asking, facts)
    shutdown()
    return gathered


def has_errors(ranks: list[dict[str, Any]]) -> bool:
    """Whether a finding about these facts is an error."""
    return any(finding.severity == "error" for finding in find(ranks))


def _measure(store: Any) -> dict[str, Any]:
    try:
        device = choose_device()
        options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank(), world_size=world_size(), timeout=_PATIENCE, **options
        )
        return measure(device)
    except (RuntimeError, PlanError) as error:
        return {"error": str(error).strip().splitlines()[0]}


def _exchange(store: Any, facts: dict[str, Any]) -> list[dict[str, Any]]:
    ranks = range(world_size())
    store.set(f"facts/{rank()}", json.dumps(facts))
    gathered = [json.loads(store.get(f"facts/{other}")) for other in ranks]
    store.set(f"read/{rank()}", "")
    if rank() == 0:  # which may hold the store
        store.wait([f"read/{other}" for other in ranks])
    return gathered
