"""Reads what loggers have written, each in its own form, into one: values by name and step, and how a run ended."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paraflow.callbacks import Callback
from paraflow.loggers.csv import CSVLogger
from paraflow.loggers.jsonlines import JSONLinesLogger
from paraflow.loggers.mlflow import MLflowLogger
from paraflow.loggers.tensorboard import TensorBoardLogger
from paraflow.loggers.wandb import WandbLogger

_OF_A_LINE = ("event", "step", "epoch", "time", "plan", "seed", "versions", "status", "error")


@dataclass
class Log:
    series: dict[str, dict[int, float]] = field(default_factory=dict)
    status: str | None = None
    plan: dict[str, Any] | None = None

    def add(self, name: str, step: int, value: float, *, replace: bool = False) -> None:
        points = self.series.setdefault(name, {})
        assert replace or step not in points, f"{name} is there twice at step {step}"
        points[step] = value


@dataclass(frozen=True)
class Kind:
    package: str | None
    make: Callable[..., Callback]
    read: Callable[[Path], Log]


def read_csv(folder: Path) -> Log:
    log = Log()
    with (folder / "log.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if name not in ("step", "epoch") and value:
                    log.add(name, int(row["step"]), float(value))
    return log


def read_lines(path: Path) -> list[dict[str, Any]]:
    def refuse(text: str) -> None:
        raise ValueError(f"{text} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def read_jsonlines(folder: Path) -> Log:
    log = Log()
    for record in read_lines(folder / "log.jsonl"):
        log.status = record.get("status", log.status)
        log.plan = record.get("plan", log.plan)
        for name in record.keys() - set(_OF_A_LINE):
            log.add(name, record["step"], float(record[name]))
    return log


def read_tensorboard(folder: Path) -> Log:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "board"), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    log = Log()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            log.add(name, event.step, event.value)
    texts = {tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    log.status = texts.get("status/text_summary", "").split(":")[0] or None
    log.plan = json.loads(texts["configuration/text_summary"])["plan"]
    return log


def wandb_records(file: Path) -> list[Any]:
    """All records of a run that is finished: W&B writes the last of them some time after it says that it has."""
    deadline = time.monotonic() + 20
    while True:
        records = list(_wandb_records(file))
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            return records
        assert time.monotonic() < deadline, f"W&B has not finished {file}"
        time.sleep(0.01)


def _wandb_records(file: Path) -> Iterator[Any]:
    """The records of W&B's file, which has the form of a LevelDB log: blocks of 32 KiB, of checksummed pieces."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield Record.FromString(parts)
            parts = b""


def wandb_files(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*/*.wandb"))


def read_wandb(folder: Path) -> Log:
    log = Log()
    for file in wandb_files(folder):  # of one run, in the order in which W&B would take them
        for record in wandb_records(file):
            if record.WhichOneof("record_type") == "history":
                for item in record.history.item:
                    name = item.key or "/".join(item.nested_key)
                    if not name.startswith("_"):
                        log.add(name, record.history.step.num, float(json.loads(item.value_json)), replace=True)
            elif record.WhichOneof("record_type") == "exit":
                log.status = "failed" if record.exit.exit_code else "finished"
            elif record.WhichOneof("record_type") == "config":
                values = {item.key: json.loads(item.value_json) for item in record.config.update}
                log.plan = values.get("plan", log.plan)
    return log


def mlflow_runs(folder: Path) -> list[Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"file:{folder / 'mlruns'}")
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return sorted(runs, key=lambda run: run.info.start_time)


def read_mlflow(folder: Path) -> Log:
    from mlflow.tracking import MlflowClient

    run = mlflow_runs(folder)[-1]
    log = Log(status=run.info.status.lower())
    for name in run.data.metrics:
        for metric in MlflowClient(f"file:{folder / 'mlruns'}").get_metric_history(run.info.run_id, name):
            log.add(name, metric.step, metric.value)
    log.plan = {key.removeprefix("plan."): text for key, text in run.data.params.items() if key.startswith("plan.")}
    return log


KINDS = {
    "csv": Kind(None, lambda folder, **more: CSVLogger(folder / "log.csv", **more), read_csv),
    "jsonlines": Kind(None, lambda folder, **more: JSONLinesLogger(folder / "log.jsonl", **more), read_jsonlines),
    "tensorboard": Kind(
        "tensorboard", lambda folder, **more: TensorBoardLogger(folder / "board", **more), read_tensorboard
    ),
    "wandb": Kind(
        "wandb", lambda folder, **more: WandbLogger("tests", folder=folder, mode="offline", **more), read_wandb
    ),
    "mlflow": Kind(
        "mlflow",
        lambda folder, **more: MLflowLogger("tests", tracking_uri=f"file:{folder / 'mlruns'}", **more),
        read_mlflow,
    ),
}
