"""Measures how fast micro-batches of each size train, and which still fit in memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from paraflow.callbacks.base import Callback
from paraflow.callbacks.curve import Curve, require_matplotlib
from paraflow.callbacks.trial import precision_of, sampler, samples_of, say
from paraflow.data.batch import count_rows
from paraflow.loss import read_step
from paraflow.profiler.attempt import attempt, seconds_of
from paraflow.sandbox import preserved

if TYPE_CHECKING:
    from paraflow.engine import Engine
    from paraflow.trainer import Trainer

_NEARLY = 0.95  # of the best throughput: what more samples at once gain beyond it is not worth their memory


class BatchSizeFinder(Callback):
    """Advises on the size of micro-batches; it changes nothing, for the batch size is a part of what is trained.

    Sizes are doubled until one is out of memory on some rank, or `high` is reached; with batch norm they begin at 2. Of
    each, forward and backward on the first samples of the data are timed, on each rank by itself: gradients are not
    exchanged, nothing is updated. The slowest rank counts. A resumed run is not measured.

    Args:
        low: The first size, in samples a rank.
        high: The greatest; None for a rank's share of all samples.
        folder: Where ``batch-size.png`` is drawn; None for no picture.
        seconds: For how long each size is timed, about.

    Attributes:
        suggestion: The smallest size within a twentieth of the best throughput, or None where none ran.
        largest: The largest size that ran, or None.
        curve: The lists ``size`` (samples a rank) and ``rate`` (samples a second on the slowest rank).
        ended: Why the measuring ended.

    Raises:
        ValueError: The sizes are not sizes.
        ParaflowError: A folder was given, and matplotlib is not installed.
    """

    def __init__(
        self, low: int = 1, high: int | None = None, folder: str | Path | None = None, seconds: float = 0.3
    ) -> None:
        if low < 1 or (high is not None and high < low):
            raise ValueError(f"low and high must be sizes of at least 1, the second not the less: {low!r}, {high!r}.")
        if folder is not None:
            require_matplotlib("BatchSizeFinder(folder=...)")
        self.low, self.high, self.seconds = low, high, seconds
        self.folder = None if folder is None else Path(folder)
        self._reset()

    def _reset(self) -> None:
        self.suggestion: int | None = None
        self.largest: int | None = None
        self.curve: dict[str, list[float]] = {"size": [], "rate": []}
        self.ended = ""

    def on_train_begin(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Measures, unless the run was resumed."""
        if trainer.step:
            return
        self._reset()
        take, self.ended = sampler(trainer)
        if take is not None:
            with preserved(trainer):
                self._measure(trainer, take)
        if self.curve["size"]:
            enough = _NEARLY * max(self.curve["rate"])
            self.suggestion = next(int(size) for size, rate in zip(*self.curve.values(), strict=True) if rate >= enough)
            self.largest = int(self.curve["size"][-1])
            self._report(trainer, self.suggestion)
        else:
            say(trainer, f"micro-batch: no suggestion, for {self.ended}")

    def _measure(self, trainer: Trainer, take: Callable[[int], Any]) -> None:
        mesh, modules = trainer.mesh, trainer.engine.module.modules()
        size = max(self.low, 2) if any(isinstance(part, _BatchNorm) for part in modules) else self.low
        share = -(-samples_of(trainer.run.feed.source) // mesh.data_ranks)
        high = share if self.high is None else self.high
        while size <= high:
            batch = attempt(partial(take, size), mesh.device)
            fits = not mesh.any(batch is None)
            short = fits and count_rows(batch) < size
            rate = self._rate(trainer, batch, size) if fits and not short else None
            if rate is None:
                self.ended = f"there are fewer than {size} samples" if short else f"{size} do not fit in memory"
                return
            self.curve["size"].append(size)
            self.curve["rate"].append(rate)
            size *= 2
        self.ended = f"the greatest size is {high}"

    def _rate(self, trainer: Trainer, batch: Any, size: int) -> float | None:
        """Returns the samples a second on the slowest rank, or None where memory ran out on one: a collective."""
        engine, mesh, count = trainer.engine, trainer.mesh, 1
        # The first run pays for what is made once (memory, kernels); the second says how many fill the time.
        for _ in range(3):
            seconds = seconds_of(partial(_train, engine, batch, size, count), mesh.device)
            if mesh.any(seconds is None):
                return None
            timed, took = count, seconds or 0.0
            # As often on every rank, for a layer may communicate.
            count = max(1, int(mesh.broadcast(self.seconds / max(took, 1e-6))))
        slowest = max(float(one) for one in mesh.all_gather(torch.tensor([took], device=mesh.device)))
        return size * timed / slowest

    def _report(self, trainer: Trainer, suggestion: int) -> None:
        say(trainer, self.table())
        batch = trainer.run.feed.source.batch_size or 1
        count = -(-batch // (trainer.mesh.data_ranks * suggestion))
        line = f"micro-batch: {suggestion} suggested, {self.largest} the largest that ran ({self.ended}); "
        line += f"for batch_size={batch} that is accumulate={count}"
        if self.folder is not None and trainer.is_main:
            line += f"; see {self._draw(self.folder)}"
        say(trainer, line)

    def table(self) -> Any:
        """Returns the sizes and throughputs as a rich table, to be printed with ``rich.print``."""
        from rich.table import Table

        table = Table("micro-batch", "samples/s", box=None, pad_edge=False)
        for size, rate in zip(*self.curve.values(), strict=True):
            table.add_row(str(size), f"{rate:,.4g}", style="bold" if size == self.suggestion else None)
        return table

    def _draw(self, folder: Path) -> Path:
        axes = ("micro-batch (samples a rank)", "samples/s on a rank")
        curve = Curve(self.curve["size"], self.curve["rate"], *axes, base=2, marked=self.suggestion, label="suggested")
        return curve.draw(folder / "batch-size.png")


def _train(engine: Engine, batch: Any, size: int, count: int) -> None:
    """Runs so many forwards and backwards, and updates nothing."""
    for _ in range(count):
        for parameter in engine.parameters:
            parameter.grad = None
        with precision_of(engine):
            output = read_step(engine.task.training_step(batch), size)
        output.loss.backward()  # type: ignore[no-untyped-call]
