"""Adds how fast training goes to the numbers of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch

from paraflow.callbacks.base import Callback
from paraflow.callbacks.token_count import token_counter
from paraflow.interval import Interval
from paraflow.profiler.flops import FlopCounter, per_sample
from paraflow.profiler.peaks import all_peaks

if TYPE_CHECKING:
    from paraflow.trainer import Trainer


class Throughput(Callback):
    """Adds ``samples_per_second``, ``seconds_per_step``, ``tokens_per_second``, ``flops_per_second`` and ``mfu``.

    They are over the steps since the last look, and of all ranks together (``flops_per_second_per_device``: of one).
    Waiting for data counts, validation does not. The run's first step, which warms up, is left out, and so is the time
    from a look to a checkpoint that comes before the next look. The device is waited for only at these moments.

    Operations are those of forward and backward, counted in the run's first micro-batch (`FlopCounter`) and taken to be
    as many for each sample; what activation checkpointing computes again is not among them. A compiled model runs that
    micro-batch uncompiled. ``mfu`` is their part of what the devices can do at the plan's precision.

    Args:
        every: How often to look.
        tokens: How a micro-batch's tokens are counted: ``"auto"``, a function, a key, or None; see `token_counter`.
        flops: ``"auto"``, or the operations of forward and backward for one sample, or None.
        peak_flops: The operations a second that one device can do; None looks in `paraflow.profiler.peaks`.

    Raises:
        ValueError: An argument is not of its kind.
    """

    def __init__(
        self,
        every: Interval | str | int = 50,
        *,
        tokens: Callable[[Any], Any] | str | None = "auto",
        flops: Literal["auto"] | float | None = "auto",
        peak_flops: float | None = None,
    ) -> None:
        for name, number in (("flops", None if flops == "auto" else flops), ("peak_flops", peak_flops)):
            if number is not None and not (isinstance(number, (int, float)) and number > 0):
                raise ValueError(f"{name} must be operations, a number above zero, not {number!r}.")
        self.every = every
        self._flops, self._peak = flops, peak_flops
        self._count_tokens = token_counter(tokens)
        self._counter: FlopCounter | None = None
        self._since: float | None = None
        self._seconds = 0.0

    def on_train_begin(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Begins; the first step is for warming up."""
        self._rates: tuple[float, float] | None = None
        self._to_count, self._restart, self._counter, self._since = self._flops == "auto", True, None, None
        self._first = self._noted = trainer.step

    def on_step_begin(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Begins to count anew where something else has taken time."""
        if self._restart:
            self._begin_at(_now(trainer))

    def _begin_at(self, now: float) -> None:
        self._restart, self._since, self._seconds = False, now, 0.0
        self._steps, self._samples, self._tokens = 0, 0, 0.0

    def on_micro_batch_begin(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Begins to count the operations of the first."""
        if self._to_count:
            self.on_micro_batch_end(trainer, logs)  # of a try that ran out of memory, and is made again
            self._to_count, self._counter = True, FlopCounter().__enter__()

    def on_before_backward(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Tells the counter where backward begins."""
        if self._counter is not None:
            self._counter.in_backward = True

    def on_micro_batch_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Ends counting."""
        if self._counter is not None:
            self._counter.close()
            self._to_count = False

    on_exception = on_micro_batch_end

    def on_validation_begin(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Stops the clock."""
        if self._since is not None:
            self._seconds, self._since = self._seconds + _now(trainer) - self._since, None

    def on_validation_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Lets it go on."""
        self._since = _now(trainer)

    def on_checkpoint(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Counts the step, if `on_step_end` has not."""
        if trainer.step == self._noted:
            return
        batch, self._noted = trainer.engine.batch, trainer.step
        self._steps, self._samples = self._steps + 1, self._samples + batch.samples
        self._tokens += sum(self._count_tokens(micro.data) for micro in batch.micro_batches if micro.samples)
        if trainer.step == self._first + 1:
            self._restart, self._share = True, batch.micro_batches[0].samples

    def on_step_end(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        """Looks."""
        self.on_checkpoint(trainer, logs)
        if self._restart or self._since is None:
            return
        mesh, now = trainer.mesh, _now(trainer)
        mine = torch.tensor([self._seconds + now - self._since, float(self._tokens)], dtype=torch.float64)
        over_ranks = torch.stack(mesh.all_gather(mine))
        seconds = max(float(over_ranks[:, 0].max()), 1e-9)
        tokens = float(over_ranks[:, 1].sum()) * mesh.data_ranks / mesh.world_size  # other ranks have the same samples
        logs.update(samples_per_second=self._samples / seconds, seconds_per_step=seconds / self._steps)
        if tokens:
            logs["tokens_per_second"] = tokens / seconds
        self._add_flops(trainer, logs)
        self._begin_at(now)

    def _add_flops(self, trainer: Trainer, logs: dict[str, Any]) -> None:
        if self._rates is None:
            counted = self._counter.model if self._counter is not None and self._share else 0.0
            one = per_sample(trainer.mesh, counted, self._share) if self._flops == "auto" else self._flops or 0.0
            self._rates = float(one), all_peaks(trainer.mesh, self._peak)
        one, peak = self._rates
        if one:
            done = one * logs["samples_per_second"]
            logs.update(flops_per_second=done, flops_per_second_per_device=done / trainer.mesh.world_size)
            logs.update({"mfu": done / peak} if peak else {})

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: it is called for a checkpoint, whose time is not training's."""
        self._restart = True
        return {}


def _now(trainer: Trainer) -> float:
    """The time at which the device has done all it was given."""
    if trainer.mesh.device.type != "cpu":
        torch.accelerator.synchronize(trainer.mesh.device)
    return time.perf_counter()
