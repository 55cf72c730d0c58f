"""The parts of one call of fit: feeds, meters, metrics, and when to validate."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

from paraflow.data import Batch, Division, Feed, Reader, Source
from paraflow.engine import Engine
from paraflow.interval import Interval
from paraflow.meters import MeanMeter
from paraflow.models.losses import gives_probabilities
from paraflow.models.metrics import MetricSet
from paraflow.step import StepResult
from paraflow.trigger import Trigger


@dataclass
class Run:
    """What a fit reads and measures.

    Attributes:
        feed: The training data.
        val_feed: The validation data, or None.
        meter: The epoch's means of losses.
        metrics: The epoch's metrics of training.
        val_metrics: Those of validation.
        val_trigger: When validation is due.
        parts: In how many parts each micro-batch is run, since memory ran out; see `paraflow.memory`.
    """

    feed: Feed
    val_feed: Feed | None
    meter: MeanMeter
    metrics: MetricSet
    val_metrics: MetricSet
    val_trigger: Trigger
    parts: int = 1

    def start(self, step: int) -> None:
        """Begins to count time, at a step."""
        self.val_trigger.start(step)

    def measure(self, batch: Batch, result: StepResult) -> None:
        """Adds a step to the epoch's means and metrics."""
        if self.metrics:
            for micro, output in zip(batch.micro_batches, result.outputs, strict=True):
                self.metrics.update(output.output, output.target, micro.samples)
                output.output = output.target = None
        self.meter.add(result.outputs)

    def compute(self) -> dict[str, float]:
        """Returns the epoch's means and metrics so far: a collective."""
        numbers = {**self.meter.compute(), **self.metrics.compute()}
        if not math.isfinite(numbers["loss"]) and self.feed.reader.division.rank == 0:
            warnings.warn(f"The loss of the epoch is {numbers['loss']}; NaNGuard finds where it begins.", stacklevel=3)
        return numbers

    def reset(self) -> None:
        """Begins an epoch's measurements."""
        self.meter.reset()
        self.metrics.reset()

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the data, and the sums of the epoch so far: a collective."""
        return {
            "feed": self.feed.state_dict(),
            "val_feed": None if self.val_feed is None else self.val_feed.state_dict(),
            "meter": self.meter.state_dict(),
            "metrics": self.metrics.state_dict(),
            "parts": self.parts,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes them up."""
        self.feed.load_state_dict(state["feed"])
        if self.val_feed is not None and state["val_feed"] is not None:
            self.val_feed.load_state_dict(state["val_feed"])
        self.parts = int(state.get("parts", 1))
        self.meter.load_state_dict(state["meter"])
        self.metrics.load_state_dict(state["metrics"], first=self.feed.reader.division.rank == 0)


def make_run(engine: Engine, source: Source, val_source: Source | None, seed: int, val_every: Interval) -> Run:
    """Makes the parts of a fit."""
    return Run(
        feed=feed_of(engine, source, seed, "training data"),
        val_feed=None if val_source is None else feed_of(engine, val_source, seed, "validation data"),
        meter=MeanMeter(engine.mesh),
        metrics=metrics_of(engine),
        val_metrics=metrics_of(engine),
        val_trigger=Trigger(val_every, engine.mesh.agree),
    )


def feed_of(engine: Engine, source: Source, seed: int, name: str) -> Feed:
    """Returns a source as this rank reads it."""
    mesh = engine.mesh
    division = Division(mesh.data_ranks, mesh.data_rank, engine.plan.accumulate)
    return Feed(source, Reader(division, seed, mesh.gather_numbers), mesh.device, name)


def metrics_of(engine: Engine) -> MetricSet:
    """Returns the model's metrics, over the samples of all data ranks."""
    mesh = engine.mesh
    group = mesh.data_group if mesh.data_ranks > 1 else None
    task = engine.task
    return MetricSet(task.metrics(), mesh.device, group, probabilities=gives_probabilities(task.recipe.loss))
