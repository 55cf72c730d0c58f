"""The report: the same facts for the eye, with rich, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from paraflow.doctor.findings import Facts, all_reduce_table, find

if TYPE_CHECKING:
    from rich.console import Console


def as_json(ranks: Sequence[Facts]) -> str:
    """The report as JSON: `ranks` (the facts of each), `all_reduce` (bytes, seconds, B/s), `findings`."""
    findings = [finding.as_dict() for finding in find(ranks)]
    return json.dumps({"ranks": ranks, "all_reduce": all_reduce_table(ranks), "findings": findings}, indent=2)


def show(ranks: Sequence[Facts], console: Console | None = None) -> None:
    """Prints the report: what rank 0 sees, what differs on the others, what was measured, and what is wrong."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console()
    for title, lines in (("Software", _software(ranks[0])), ("Hosts", _hosts(ranks)), ("Ranks", _ranks(ranks))):
        table = Table(
            title=title, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2)
        )
        for name, text in lines:
            table.add_row(Text(name, style="cyan"), Text(text))
        console.print(table)
        console.print()
    rows = all_reduce_table(ranks)
    if rows:
        table = Table(
            title=f"All-reduce between {len(ranks)} ranks", title_justify="left", title_style="bold", box=None
        )
        for name in ("size", "time", "algorithm", "bus", "sum"):
            table.add_column(name, justify="right")
        for row in rows:
            speeds = [f"{row[name] / 1e9:.3g} GB/s" for name in ("algorithm", "bus")]
            time = f"{row['seconds'] * 1e6:.0f} µs"
            table.add_row(_size(row["bytes"]), time, *speeds, "right" if row["right"] else "WRONG")
        console.print(table)
        console.print()
    findings = find(ranks)
    console.print(Text("What is wrong" if findings else "Nothing is wrong.", style="bold"))
    for finding in findings:
        style = "bold red" if finding.severity == "error" else "yellow"
        console.print(Text.assemble((finding.severity, style), f": {finding.sentence} ", (finding.remedy, "green")))


def _software(facts: Facts) -> Iterable[tuple[str, str]]:
    yield from ((name, version or "not there") for name, version in facts["versions"].items())
    yield "backends", ", ".join(name for name, there in facts["backends"].items() if there) or "none"
    yield "environment", "\n".join(f"{name}={value}" for name, value in facts["environment"].items()) or "nothing set"


def _hosts(ranks: Sequence[Facts]) -> Iterable[tuple[str, str]]:
    for facts in {facts["hostname"]: facts for facts in reversed(ranks)}.values():
        memory, shared, disk = facts["memory"], facts["shared_memory"], facts.get("disk")
        yield facts["hostname"], f"{facts['system']}, address {facts['address'] or 'unknown'}"
        yield "  cores", f"{facts['cores']:g} usable of {facts['cores_of_host']}, {facts['threads']} threads a rank"
        limit = "" if memory["limit"] is None else f", of which this process may have {_size(memory['limit'])}"
        yield "  memory", f"{_size(memory['available'])} available of {_size(memory['total'])}{limit}"
        if shared is not None:
            yield "  /dev/shm", f"{_size(shared['free'])} free of {_size(shared['total'])}"
        yield "  open files", f"at most {facts['open_files']} a process"
        for name, interface in facts["interfaces"].items():
            speed = f", {interface['speed']} Mbit/s" if interface["speed"] else ""
            used = ", used by the ranks" if name in facts.get("used_interfaces", ()) else ""
            yield f"  {name}", f"{interface['address'] or 'no IPv4 address'}{speed}{used}"
        for index, device in enumerate(facts["devices"]):
            bf16 = "bf16" if device["bf16"] else "no bf16"
            yield (
                f"  device {index}",
                f"{device['name']}, {_size(device['free'])} free of {_size(device['memory'])}, {bf16}",
            )
        if not facts["devices"]:
            yield "  devices", "none but the CPU"
        if disk is not None and "write" in disk:
            speed = f"writes {disk['write'] / 1e6:.0f} MB/s, syncs in {disk['sync_seconds'] * 1e3:.1f} ms"
            yield "  disk", f"{disk['folder']}: {_size(disk.get('free'))} free, {speed}"


def _ranks(ranks: Sequence[Facts]) -> Iterable[tuple[str, str]]:
    for facts in ranks:
        measured = facts.get("measured") or {}
        parts = [facts["hostname"]]
        if "device" in measured:
            parts.append(f"{measured['device']}: computes {measured['compute'] / 1e9:.3g} GFLOP/s")
        if measured.get("exchange"):
            parts.append(f"exchanges with its neighbours {measured['exchange'] / 1e9:.3g} GB/s")
        if "clock" in facts:
            parts.append("clock {:+.1f} ms (± {:.1f})".format(*(1e3 * part for part in facts["clock"])))
        yield f"rank {facts['rank']}", ", ".join(parts)


def _size(number: int | None) -> str:
    if number is None:
        return "unknown"
    amount, unit = float(number), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.4g} {unit}"
