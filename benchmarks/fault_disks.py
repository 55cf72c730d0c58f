"""Checkpoints that cannot be written, that were altered, and that somebody made to do harm."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from fault_jobs import LARGE, Bench, Job, Row, two_at_a_time

from paraflow import CheckpointError
from paraflow.checkpoint.reading import read, verify

FILES = ("tensors-00000.safetensors", "state.json", "checksums.json")
_KILLED_AT = 30  # of 4-step intervals: steps 24 and 28 are on the disk
_DISK = 28  # MB: one large checkpoint fits, and half of another


@contextlib.contextmanager
def _disk(folder: Path, megabytes: int) -> Iterator[str | None]:
    """A small disk in memory; yields why there is none, or None."""
    folder.mkdir(parents=True)
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        yield "needs root, to mount a tmpfs"
        return
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        yield f"no tmpfs can be mounted here: {done.stderr.strip()}"
        return
    try:
        yield None
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def full_disk(bench: Bench) -> list[Row]:
    """Saves to a disk on which one checkpoint fits, and half of another."""
    cases = [(1, False), (2, True)]
    failing: list[bool | str] = two_at_a_time([partial(_full_disk_fails, bench, *case) for case in cases])
    going_on: list[bool | str] = two_at_a_time([partial(_full_disk_goes_on, bench, *case) for case in cases])
    return [
        _disk_row(
            "full disk, 1 and 2 processes", failing, "path and bytes said; resumed from the one before, bit-equal"
        ),
        _disk_row('full disk, on_error="continue"', going_on, "finished, bit-equal; the one before is intact"),
    ]


def _disk_row(title: str, done: list[bool | str], words: str) -> Row:
    why = next((one for one in done if isinstance(one, str)), None)
    if why is not None:
        return Row(title, f"skipped: {why}", right=None)
    return Row(title, f"{sum(map(bool, done))} of {len(done)}: {words}", right=all(done))


def _full_disk_fails(bench: Bench, ranks: int, background: bool) -> bool | str:
    name = f"full-disk-{ranks}"
    options = {**LARGE, "background": background}
    untouched = bench.untouched(ranks, options)
    with bench.trial(name) as folder, _disk(folder / "disk", _DISK) as why:
        if why is not None:
            return why
        options = {**options, "keep": 1, "checkpoints": str(folder / "disk" / "checkpoints")}
        job = Job(folder, ranks, options)
        code = job.wait()
        said = re.search(
            r"'(\S+/step-\d+)' could not be written: No space left on device: it needs ([\d,]+) bytes, and '(\S+)' has "
            r"([\d,]+) left",
            job.output,
        )
        if code in (None, 0) or said is None or not int(said[2].replace(",", "")) > int(said[4].replace(",", "")):
            bench.wrong(name, f"exit status {code}, and no sentence with path and bytes", job)
            return False
        bench.say(f"{name}: {said[0]}")
        subprocess.run(["mount", "-o", f"remount,size={4 * _DISK}m", str(folder / "disk")], check=True)
        resumed = Job(folder, ranks, options)
        code, began = resumed.wait(), resumed.trace("train")
        if code != 0 or not began or began[0]["step"] != LARGE["every"]:
            bench.wrong(name, f"resumed, it ended with {code}, or not from step {LARGE['every']}", resumed)
            return False
        return bench.compare(name, folder, untouched, resumed)


def _full_disk_goes_on(bench: Bench, ranks: int, background: bool) -> bool | str:
    name = f"full-disk-continue-{ranks}"
    options = {**LARGE, "background": background}
    untouched = bench.untouched(ranks, options)
    with bench.trial(name) as folder, _disk(folder / "disk", _DISK) as why:
        if why is not None:
            return why
        checkpoints = folder / "disk" / "checkpoints"
        job = Job(folder, ranks, {**options, "keep": 1, "checkpoints": str(checkpoints), "on_error": "continue"})
        code = job.wait()
        if code != 0 or "No space left on device" not in job.output:
            bench.wrong(name, f"it ended with {code}, or the disk was not full", job)
            return False
        try:
            verify(checkpoints / f"step-{LARGE['every']:08d}")
        except CheckpointError as error:
            bench.wrong(name, f"the checkpoint before is gone: {error}", job)
            return False
        return bench.compare(name, folder, untouched, job)


def _interrupted(bench: Bench) -> Path:
    """The folder of checkpoints of a run that was killed, made once."""
    folder = bench.folder / "interrupted"
    if not folder.exists():
        job = Job(folder, 1, {"at": _KILLED_AT, "what": "kill"})
        if job.wait() != 128 + 9:
            raise SystemExit(f"The run that should kill itself did not:\n{job.output}")
    return folder / "checkpoints"


def _newest(checkpoints: Path) -> list[Path]:
    return sorted(checkpoints.glob("step-*"))[-2:][::-1]


def flipped_bits(bench: Bench) -> list[Row]:
    """Flips one bit at a time, and cuts files short."""
    checkpoints, chance, many = _interrupted(bench), bench.chance("bits"), 10 * bench.times
    noticed = dict.fromkeys(FILES, 0)
    with bench.trial("bits") as folder:
        copy = folder / "step-00000028"
        shutil.copytree(_newest(checkpoints)[0], copy)
        read(copy)  # whole, it is taken
        for file in FILES:
            content = (copy / file).read_bytes()
            for _ in range(many):
                (copy / file).write_bytes(_flipped(content, chance))
                try:
                    read(copy)
                except CheckpointError:
                    noticed[file] += 1
            (copy / file).write_bytes(content)
            if noticed[file] < many:
                bench.wrong("bits", f"{many - noticed[file]} of {many} flipped bits of {file} were not noticed")
    tries = [
        partial(_altered, bench, f"{what}-{file}", file, alter)
        for what, alter in (("flipped", _flipped), ("truncated", _truncated))
        for file in FILES
    ]
    taken: list[bool] = two_at_a_time(tries)
    return [
        Row(
            "one bit flipped, at random, in each file",
            f"{sum(noticed.values())} of {many * len(FILES)} noticed",
            right=min(noticed.values()) == many,
        ),
        Row(
            'a bit flipped, or the file truncated: resume="auto"',
            f"{sum(taken)} of {len(taken)} took the checkpoint before, said so, and ended bit-equal",
            right=all(taken),
        ),
    ]


def _flipped(content: bytes, chance: Random) -> bytes:
    place = chance.randrange(8 * len(content))
    return bytes(byte ^ (1 << place % 8) if at == place // 8 else byte for at, byte in enumerate(content))


def _truncated(content: bytes, chance: Random) -> bytes:
    return content[: chance.randrange(len(content))]


def _altered(bench: Bench, name: str, file: str, alter: Callable[[bytes, Random], bytes]) -> bool:
    source, untouched = _interrupted(bench), bench.untouched(1, {})
    with bench.trial(name) as folder:
        shutil.copytree(source, folder / "checkpoints")
        newest, before = _newest(folder / "checkpoints")
        (newest / file).write_bytes(alter((newest / file).read_bytes(), bench.chance(name)))
        job = Job(folder, 1, {})
        code, began = job.wait(), job.trace("train")
        expected = int(before.name.removeprefix("step-"))
        if code != 0 or not began or began[0]["step"] != expected or "left out:" not in job.output:
            bench.wrong(name, f"it ended with {code}, or did not say that it goes on from step {expected}", job)
            return False
        return bench.compare(name, folder, untouched, job) and not bench.unpickled(name, folder)


class _Harm:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self._code = f"open({str(file)!r}, 'w').close()"

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (self._code,)


def _pickled(newest: Path, file: str, harm: Path) -> None:
    (newest / file).write_bytes(pickle.dumps(_Harm(harm)))


def _saved_by_torch(newest: Path, file: str, harm: Path) -> None:
    torch.save({"model": _Harm(harm)}, newest / file)


def _named(newest: Path, file: str, harm: Path) -> None:
    """Names of a module that makes a file when it is imported, wherever a reader of JSON might look for one."""
    state = json.loads((newest / file).read_text())
    call = ["fault_harm.harm", []]
    names = {"__class__": "fault_harm.Harm", "py/object": "fault_harm.Harm", "py/reduce": call, "__reduce__": call}
    names |= {"_target_": "fault_harm.harm", "!!python/object/apply:fault_harm.harm": []}

    def poison(value: Any) -> Any:
        if isinstance(value, dict) and not any(key.startswith("__") for key in value):
            return {**{key: poison(child) for key, child in value.items()}, **names}
        return value

    (newest / file).write_text(json.dumps({**state, "state": poison(state["state"])}))


def _all_strings(newest: Path, file: str, harm: Path) -> None:
    """The same names in place of every string but the marks of tensors."""

    def poison(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: child if key == "__tensor__" else poison(child) for key, child in value.items()}
        if isinstance(value, list):
            return [poison(child) for child in value]
        return "fault_harm.harm" if isinstance(value, str) else value

    (newest / file).write_text(json.dumps(poison(json.loads((newest / file).read_text()))))


def _deep(newest: Path, file: str, harm: Path) -> None:
    (newest / file).write_text("[" * 200_000)


def hostile(bench: Bench) -> list[Row]:
    """Resumes from checkpoints that were made to do harm, their checksums made to match."""
    cases = [(file, make) for make in (_pickled, _saved_by_torch) for file in FILES]
    cases += [("state.json", make) for make in (_named, _all_strings, _deep)]
    done: list[bool] = two_at_a_time([partial(_hostile, bench, file, make) for file, make in cases])
    result = f"{sum(done)} of {len(done)} executed, unpickled and imported nothing, and said what is wrong"
    return [Row("hostile checkpoint: pickles, names to import, deep nesting", result, right=all(done))]


def _hostile(bench: Bench, file: str, make: Callable[[Path, str, Path], None]) -> bool:
    name = f"hostile{make.__name__}-{file}".replace("_", "-")
    source = _interrupted(bench)
    with bench.trial(name) as folder:
        harm = folder / "harm"
        (folder / "fault_harm.py").write_text(f"open({str(harm)!r}, 'w').close()\ndef harm(*_): pass\n")
        shutil.copytree(source, folder / "checkpoints")
        newest = _newest(folder / "checkpoints")[0]
        make(newest, file, harm)
        if file != "checksums.json":
            sums = {part: hashlib.sha256((newest / part).read_bytes()).hexdigest() for part in FILES[:2]}
            (newest / "checksums.json").write_text(json.dumps(sums))
        job = Job(folder, 1, {})
        code, output = job.wait(), job.output
        last = output.rstrip().splitlines()[-1]
        bench.say(f"{name}: exit status {code}, {last}")
        # Names beside what is read do no harm, and nothing need be wrong with them.
        said = "left out:" in output if code == 0 else re.match(r"paraflow\.errors\.\w+Error: ", last) is not None
        if harm.exists() or code is None or not (said or make is _named):
            bench.wrong(name, f"{'harm was done' if harm.exists() else 'nothing was said'}, exit status {code}", job)
            return False
        return not bench.unpickled(name, folder)
