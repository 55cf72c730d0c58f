from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import paraflow as pf
from paraflow.callbacks.model_summary import ModelSummary
from tests.callbacks.traces import arrays, difference, left_by, network
from tests.plugins.toy_shard import ToyShard
from tests.pool import Pool


def summarised(model: nn.Module, data: Any, depth: int = 2, flops: bool = True, **options: Any) -> Any:
    out = io.StringIO()
    summary = ModelSummary(depth, flops)
    sizes = {"batch_size": options.pop("batch_size")} if "batch_size" in options else {}
    trainer = pf.Trainer(max_steps=1, callbacks=[summary], **options)
    trainer.console = Console(file=out, width=120)
    trainer.fit(model, data, **sizes)
    return summary, out.getvalue()


def test_the_table_of_a_small_network() -> None:
    summary, text = summarised(network(), arrays(32), batch_size=16, accumulate=2)
    lines = [line.split() for line in text.splitlines()]
    assert ["module", "class", "output", "parameters", "FLOPs", "for", "backward"] in lines
    # A micro-batch has 8 samples: 2 · 8 · 4 · 8 and 2 · 8 · 8 · 3 operations. Both layers keep their inputs, batch norm
    # its input and two numbers a channel, the ReLU its output, dropout its mask; the loss the logarithms (96 B),
    # the targets (64 B) and the sum of the weights (4 B).
    assert ["0", "Linear", "8", "×", "8", "40", "(8", "frozen)", "512", "128", "B"] in lines
    assert ["1", "BatchNorm1d", "8", "×", "8", "16", "0", "320", "B"] in lines
    assert ["3", "Dropout", "8", "×", "8", "0", "0", "256", "B"] in lines
    assert ["head", "Linear", "8", "×", "3", "27", "384", "256", "B"] in lines
    kept = 128 + 320 + 256 + 256 + 256 + 96 + 64 + 4
    assert summary.rows[0].activation_bytes == kept
    assert f"total Network 8 × 3 83 (8 frozen) 896 {kept / 1024:.4g} KiB".split() in lines
    assert "83 parameters, 75 of them trained; measured on a micro-batch of 8 samples" in text
    assert summary.samples == 8
    assert [row.path for row in summary.rows] == ["", "body", "body.0", "body.1", "body.2", "body.3", "head"]
    assert summary.rows[0].flops == 896


def test_the_depth_and_flops_that_were_asked_for() -> None:
    summary, text = summarised(network(), arrays(32), depth=1, batch_size=8)
    assert [row.path for row in summary.rows] == ["", "body", "head"]
    assert "BatchNorm1d" not in text
    summary, text = summarised(network(), arrays(32), depth=1, flops=False, batch_size=8)
    assert "FLOPs" not in text
    assert summary.rows[0].flops is None
    assert summary.rows[0].parameters == 83


def test_batches_that_come_ready_made_are_not_read() -> None:
    read: list[int] = []

    def batches() -> Any:
        for number in range(2):
            read.append(number)
            yield arrays(8)

    model = pf.configure(nn.Linear(4, 3), loss="cross_entropy")
    seen: list[int] = []

    class After(pf.Callback):
        def on_train_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
            seen.extend(read)

    summary = ModelSummary()
    pf.Trainer(max_steps=1, callbacks=[summary, After()], progress=False).fit(model, batches)
    assert seen == []
    assert summary.note == (
        "FLOPs and activations were not measured: batches come ready-made, so there is no sample to measure with."
    )
    assert summary.rows[0].parameters == 15


class Greedy(nn.Module):
    """Cannot be run on more than two samples at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.runs = 0

    def training_step(self, batch: Any) -> torch.Tensor:
        self.runs += 1
        if self.runs == 1:
            torch.empty(2**50)
        return self.layer(batch[0]).sum()


def test_what_does_not_fit_in_memory_is_said() -> None:
    summary, text = summarised(Greedy(), arrays(8), batch_size=8)
    assert "not measured: a micro-batch does not fit in memory." in text
    assert summary.rows[0].parameters == 15


def test_without_progress_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    summary = ModelSummary()
    pf.Trainer(max_steps=1, callbacks=[summary], progress=False).fit(network(), arrays(), batch_size=8)
    assert summary.rows[0].flops == 896
    assert capfd.readouterr() == ("", "")


def _with_and_without(plan: dict[str, Any]) -> tuple[str, Any, Any]:
    summary = ModelSummary()
    where = difference(left_by([summary], **plan), left_by([], **plan))
    return where, summary.rows, summary.samples


@pytest.mark.parametrize("plan", [{}, {"precision": "fp16"}, {"data": "dataset"}], ids=["plain", "fp16", "dataset"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_no_trace_is_left(ranks: Pool, world_size: int, plan: dict[str, Any]) -> None:
    results = ranks(world_size, _with_and_without, plan)
    for where, rows, count in results:
        assert where == ""
        assert rows == results[0][1]
        assert count == 8 // world_size
        assert rows[0].flops == 896 // world_size


def _sharded() -> tuple[str | None, list[int]]:
    torch.manual_seed(0)
    model = pf.configure(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), loss="cross_entropy", optimizer="sgd")
    summary, _ = summarised(model, arrays(8), batch_size=8, plugins=[ToyShard(2)])
    return summary.note, [row.parameters for row in summary.rows]


def test_a_sharded_model_is_counted_whole(ranks: Pool) -> None:
    for note, parameters in ranks(2, _sharded):
        assert note is not None
        assert "the model is spread over ranks" in note
        assert parameters == [67, 40, 27]


def test_a_compiled_model_is_measured_as_it_is_written() -> None:
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:  # stands for Inductor, which is slow
        compiled.append(1)
        return graph

    at_the_beginning: list[int] = []
    note = pf.callbacks.LambdaCallback(on_train_begin=lambda trainer, logs: at_the_beginning.append(len(compiled)))
    summary = ModelSummary()
    plugin = pf.plugins.Compile(backend=backend)
    trainer = pf.Trainer(max_steps=1, callbacks=[summary, note], plugins=[plugin], progress=False)
    trainer.fit(network(), arrays(), batch_size=8)
    assert [row.flops for row in summary.rows] == [896, 512, 512, 0, 0, 0, 384]
    assert at_the_beginning == [0]
    assert compiled, "the training itself is compiled"


@pytest.mark.parametrize("depth", [-1, 1.5, True])
def test_a_depth_of_another_kind_is_refused(depth: Any) -> None:
    with pytest.raises(ValueError, match="depth must be a whole number of at least 0"):
        ModelSummary(depth)
