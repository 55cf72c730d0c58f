"""Hosts on one machine, and that what benchmarks/ has by hand computes what one process does."""

from __future__ import annotations

import copy
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tests.pool import Pool

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import by_hand_classification  # noqa: E402
import by_hand_pipeline  # noqa: E402
import hosts as room  # noqa: E402

IS_ROOT = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None, reason="needs root, ip and tc"
)
SUMS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((1_250_000,), float(dist.get_rank() + 1))
dist.all_reduce(x)
print("sum", x.max().item(), "of", dist.get_world_size())
dist.destroy_process_group()
"""
FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    print("the disk is full")
    sys.exit(7)
time.sleep(300)
"""
SLEEPS = """
import time
print("asleep", flush=True)
time.sleep(300)
"""


def left_of(process: int) -> list[str]:
    """What is left of the hosts of a process."""
    found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    found += subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    found += "\n".join(str(path) for path in Path("/etc/netns").glob("*"))
    return [line for line in found.splitlines() if f"pfh{process}" in line]


def write(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text, encoding="utf-8")
    return str(folder / "script.py")


@IS_ROOT
@pytest.mark.root
def test_ranks_on_hosts_meet_over_the_network_and_nothing_is_left(tmp_path: Path) -> None:
    with room.Hosts(2, "200mbit") as hosts:
        assert left_of(os.getpid())
        run = hosts.run([write(tmp_path, SUMS)], show=False)
        assert run.status == 0, run.output
        assert "sum 3.0 of 2" in run.output
        # 5 MB over two ranks: each sends half of it, and half of the sum.
        assert all(4.9e6 < number < 6e6 for number in (*run.sent, *run.received)), run
        assert hosts.run([write(tmp_path, SUMS)], show=False).status == 0
    assert left_of(os.getpid()) == []


@IS_ROOT
@pytest.mark.root
def test_a_host_that_fails_ends_the_run_with_its_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with room.Hosts(2) as hosts:
        run = hosts.run([write(tmp_path, FAILS)], show=False)
    assert run.status == 7
    assert "the disk is full" in capsys.readouterr().err
    assert left_of(os.getpid()) == []


@IS_ROOT
@pytest.mark.root
def test_a_run_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(room.HostsError, match="not ended within 8 seconds"), room.Hosts(2) as hosts:
        hosts.run([write(tmp_path, SLEEPS)], timeout=8, show=False)
    assert left_of(os.getpid()) == []


@IS_ROOT
@pytest.mark.root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_hosts_are_removed_however_it_ends(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, f"{ROOT}/benchmarks/hosts.py", write(tmp_path, SLEEPS)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    assert any("asleep" in line for line in process.stdout)
    process.send_signal(number)
    process.stdout.close()
    assert process.wait(60) == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    if number == signal.SIGKILL:
        assert left_of(process.pid)
        room.remove_left_over()
    assert left_of(process.pid) == []
    assert script_has_ended(str(tmp_path))


@IS_ROOT
@pytest.mark.root
def test_split_classes_train_alike_and_send_less() -> None:
    said = {}
    with room.Hosts(2) as hosts:
        for flags in ((), ("--plain",)):
            script = [f"{ROOT}/examples/classification_100k.py", "--classes", "4000", "--steps", "8", *flags]
            run = hosts.run(script, show=False)
            assert run.status == 0, run.output
            loss, sent = re.search(r"epoch 1 .*loss (\S+)", run.output), re.search(r"host: (\S+) MB", run.output)
            assert loss is not None, run.output
            assert sent is not None, run.output
            said[flags] = loss[1], float(sent[1])
    hybrid, plain = said[()], said[("--plain",)]
    assert hybrid[0] == plain[0]
    assert plain[1] > 8 > 1 > hybrid[1]  # the classifier has 8.2 MB


@IS_ROOT
@pytest.mark.root
def test_a_pipeline_over_hosts_runs() -> None:
    with room.Hosts(2) as hosts:
        run = hosts.run([f"{ROOT}/examples/bert_pipeline.py", "--layers", "4", "--steps", "5"], show=False)
    assert run.status == 0, run.output
    assert "2 ranks, 2 stages" in run.output


def script_has_ended(word: str) -> bool:
    """Whether no process has a word in its command."""
    for _ in range(100):
        commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
        if not any(word.encode() in command for command in commands):
            return True
        time.sleep(0.1)
    return False


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(room.HostsError, match=r"The rate '1 Gb' is none. Write a number with kbit, mbit or gbit"):
        room.Hosts(2, "1 Gb")
    with pytest.raises(room.HostsError, match="from 1 to 200"):
        room.Hosts(0)
    monkeypatch.setattr(shutil, "which", lambda program: None if program == "tc" else f"/sbin/{program}")
    with pytest.raises(room.HostsError, match=r"no program tc here. Install iproute2"):
        room.Hosts(2).__enter__()
    monkeypatch.setattr(shutil, "which", lambda program: f"/sbin/{program}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(room.HostsError, match="needs root"):
        room.Hosts(2).__enter__()


def differences(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float((value - wanted[name]).abs().max()) for name, value in found.items()}


def classify() -> tuple[list[float], dict[str, float]]:
    """Losses less those of one process, and the largest difference of each parameter, after three steps."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    head = nn.Linear(8, 40)
    one = nn.Sequential(copy.deepcopy(features), copy.deepcopy(head))
    whole = by_hand_classification.DataParallelByHand(copy.deepcopy(features), copy.deepcopy(head))
    hybrid = by_hand_classification.HybridByHand(features, head)
    optimizer, own = by_hand_classification.sgd(one), slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    losses = []
    for _ in range(3):
        images, classes = torch.randn(16, 3, 8, 8), torch.randint(40, (16,))
        optimizer.zero_grad()
        loss = functional.cross_entropy(one(images), classes)
        loss.backward()
        optimizer.step()
        mean = whole.step(images[own], classes[own]) / 4
        dist.all_reduce(mean)
        losses += [float(hybrid.step(images[own], classes[own]) - loss), float(mean - loss)]
    wanted = one.state_dict()
    found = differences(whole.model.state_dict(), wanted)
    for name, value in hybrid.features.state_dict().items():
        found[f"hybrid {name}"] = float((value - wanted[f"0.{name}"]).abs().max())
    for name, value in hybrid.head.state_dict().items():
        part = wanted[f"1.{name}"][hybrid.first : hybrid.first + 10]
        found[f"hybrid head {name}"] = float((value - part).abs().max())
    return losses, found


def pretrain(stages: int, micro_batches: int) -> tuple[list[float], dict[str, float]]:
    """The same of BERT as a pipeline, and data-parallel."""
    from transformers import BertConfig, BertForMaskedLM

    dist.init_process_group("gloo")
    small: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    torch.manual_seed(0)
    one = BertForMaskedLM(
        BertConfig(
            **small, vocab_size=50, intermediate_size=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
    )
    whole = by_hand_pipeline.DataParallelByHand(copy.deepcopy(one))
    pipeline = by_hand_pipeline.PipelineByHand(copy.deepcopy(one), stages, micro_batches)
    optimizer, ranks, losses = by_hand_pipeline.adamw(one.parameters()), dist.get_world_size(), []
    for _ in range(3):
        ids = torch.randint(50, (16, 12))
        batch = {"input_ids": ids, "labels": torch.where(torch.rand(16, 12) < 0.2, ids, -100)}
        optimizer.zero_grad()
        loss = one(**batch).loss
        loss.backward()
        optimizer.step()
        share = {name: value.chunk(ranks // stages)[pipeline.replica] for name, value in batch.items()}
        rows = {name: value.chunk(ranks)[dist.get_rank()] for name, value in batch.items()}
        parts = torch.stack([pipeline.step(share) or torch.zeros(()), whole.step(rows)])
        dist.all_reduce(parts)
        losses += (parts - loss.detach()).tolist()
    wanted = one.state_dict()
    found = differences(whole.model.state_dict(), wanted)
    number = len(one.bert.encoder.layer) // stages
    for name, value in pipeline.modules.state_dict().items():
        kind, _, rest = name.partition(".")
        if kind == "layers":
            place, _, rest = rest.partition(".")
            origin = f"bert.encoder.layer.{int(place) + pipeline.stage * number}.{rest}"
        else:
            origin = {"embeddings": "bert.embeddings.", "head": "cls."}[kind] + rest
        found[f"stage {name}"] = float((value - wanted[origin]).abs().max())
    return losses, found


@pytest.mark.slow
@pytest.mark.parametrize("case", [(classify,), (pretrain, 2, 4), (pretrain, 4, 2)], ids=lambda case: str(case[1:]))
def test_what_is_written_by_hand_computes_what_one_process_does(case: tuple[Any, ...], ranks: Pool) -> None:
    for losses, parameters in ranks(4, *case, timeout=120):
        assert max(map(abs, losses)) < 2e-5, losses
        # AdamW divides by the root of a gradient's square: where that is nearly 0, roundings grow to a step's size.
        assert max(parameters.values()) < (1e-6 if case[0] is classify else 1e-4), parameters
