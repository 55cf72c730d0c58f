"""What callbacks share that try a model out before it is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from paraflow.data.batch import map_tensors, to_device
from paraflow.plugins.precision import DTYPES

if TYPE_CHECKING:
    from paraflow.data import Source
    from paraflow.engine import Engine
    from paraflow.trainer import Trainer


def say(trainer: Trainer, line: Any) -> None:
    """Prints a line or a table where progress is printed."""
    if trainer.progress and trainer.is_main:
        trainer.console.print(line, highlight=False, soft_wrap=isinstance(line, str))


def sampler(trainer: Trainer) -> tuple[Callable[[int], Any] | None, str]:
    """Returns a function from a number of rows to a micro-batch on this rank's device, to run the model on by itself.

    Returns:
        The function, and an empty text; or None, and why one rank cannot run the model on some samples.
    """
    source, engine = trainer.run.feed.source, trainer.engine
    if engine.partition_dims or engine.plan.world_size > engine.plan.dp:
        return None, "the model is spread over ranks, so one rank cannot measure it"
    sample = getattr(source, "sample", None)
    if sample is None or source.batch_size is None:
        return None, "batches come ready-made, so there is no sample to measure with"
    # Cloned, for a sample of arrays is a view, and what keeps it for backward would seem to keep all the data.
    return lambda rows: map_tensors(torch.clone, to_device(sample(rows), engine.mesh.device)), ""


def samples_of(source: Source) -> int:
    """Returns an upper bound on the samples of an epoch."""
    return (source.length or 1) * (source.batch_size or 1)


def micro_batch_rows(trainer: Trainer) -> int:
    """Returns the samples of the run's largest micro-batch."""
    source = trainer.run.feed.source
    rows = min(source.batch_size or 1, samples_of(source))
    share = -(-rows // trainer.mesh.data_ranks)
    return -(-share // trainer.plan.accumulate)


def precision_of(engine: Engine) -> AbstractContextManager[Any]:
    """Returns the context in which the plan's precision runs forward."""
    dtype = DTYPES.get(engine.plan.precision)
    return nullcontext() if dtype is None else torch.autocast(engine.mesh.device.type, dtype=dtype)


def reads_once(source: Source) -> bool:
    """Whether the data is an iterator, which is spent when it has been looked at."""
    return isinstance(getattr(source, "_batches", None), Iterator)
