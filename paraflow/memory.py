"""Steps that run out of memory, run again in smaller micro-batches: on all ranks, if one has run out.

A rank that runs out of memory in the middle of a step cannot simply leave it, for the others wait for it in the step's
collectives. It tells them, waits until all have heard, and goes through the rest of the step with a stand-in of one
sample. Before the optimizer every rank gives the step up, and all begin it anew from the original micro-batches, each
cut in twice as many parts. Nothing is paid for this in a step that fits.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from paraflow.data.batch import Batch, MicroBatch, count_rows, take_rows
from paraflow.data.division import rows_to_read
from paraflow.engine import Engine, StepAbandoned, StepResult
from paraflow.errors import ParaflowError
from paraflow.loss import StepOutput
from paraflow.profiler.attempt import is_out_of_memory

if TYPE_CHECKING:
    from paraflow.run import Run
    from paraflow.watch import Watch


def stepping(
    engine: Engine, run: Run, watch: Watch, say: Callable[[str], None], *, may_halve: bool
) -> Callable[[Batch], StepResult]:
    """Returns what runs a step: the engine, or a guard around it where micro-batches may be halved.

    A step can be begun anew where its only collectives are those of its gradients.
    """
    if not may_halve or not engine.runs_in_turn or engine.partition_dims:
        return engine.train_step
    return MemoryGuard(engine, run, watch, say).train_step


class MemoryGuard:
    """Runs steps, and halves their micro-batches when memory runs out.

    Args:
        engine: Whose steps are run.
        run: Holds in how many parts each micro-batch is run, which is part of a run's state.
        watch: Tells the ranks.
        say: Prints a line on rank 0.
    """

    def __init__(self, engine: Engine, run: Run, watch: Watch, say: Callable[[str], None]) -> None:
        self._engine, self._run, self._watch, self._say = engine, run, watch, say
        self._plain = engine.run_micro_batch
        self._attempt = 0
        self._buffers = list(engine.module.buffers())

    def train_step(self, batch: Batch) -> StepResult:
        """Runs one step, in as many attempts as it takes.

        Raises:
            ParaflowError: Not even micro-batches of one sample fit.
        """
        engine, before = self._engine, [buffer.clone() for buffer in self._buffers]
        engine.run_micro_batch, engine.abandons = self._run_micro_batch, self._given_up
        try:
            while True:
                self._attempt += 1
                try:
                    return engine.train_step(in_parts(batch, self._run.parts))
                except StepAbandoned:
                    self._halve(batch)
                for buffer, old in zip(self._buffers, before, strict=True):
                    buffer.copy_(old)
        finally:
            engine.run_micro_batch, engine.abandons = self._plain, None

    def _given_up(self) -> bool:
        return self._watch.given_up(self._attempt)

    def _run_micro_batch(self, micro: MicroBatch, batch: Batch) -> StepOutput:
        if self._given_up():
            return self._plain(stand_in(micro), batch)
        try:
            return self._plain(micro, batch)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._require_repairable(micro, batch, error)
        # Only here, where the error and the frames that it holds are gone, is their memory free.
        if self._engine.mesh.device.type == "cuda":
            torch.cuda.empty_cache()
        if self._engine.mesh.world_size == 1:
            raise StepAbandoned
        self._watch.give_up(self._attempt)
        return self._plain(stand_in(micro), batch)

    def _require_repairable(self, micro: MicroBatch, batch: Batch, error: BaseException) -> None:
        """Refuses where the ranks have exchanged some of this step's gradients, and cannot exchange them again."""
        engine = self._engine
        exchanging = engine.mesh.data_ranks > 1 and micro is batch.micro_batches[-1] and _in_backward(error)
        if exchanging and engine.gradients():
            raise ParaflowError(
                f"Rank {engine.mesh.rank} ran out of memory in backward, while gradients were being averaged, and the "
                f"step cannot be run again. Write accumulate={2 * len(batch.micro_batches)}."
            ) from error

    def _halve(self, batch: Batch) -> None:
        parts = self._run.parts
        largest = -(-max(batch.shares) // len(batch.micro_batches))
        if parts >= largest:
            raise ParaflowError(
                f"A micro-batch of {-(-largest // parts)} sample does not fit in memory. Use shorter samples, a "
                "smaller model, or precision='bf16'."
            )
        self._run.parts = 2 * parts
        self._say(
            f"out of memory: from this step on each micro-batch of up to {largest} samples is run in {2 * parts} parts"
        )


def _in_backward(error: BaseException) -> bool:
    frames = error.__traceback__
    while frames is not None:
        if frames.tb_frame.f_code.co_name == "_engine_run_backward":
            return True
        frames = frames.tb_next
    return False


def in_parts(batch: Batch, parts: int) -> Batch:
    """Returns a batch whose micro-batches are each cut in so many, the same number on every rank.

    Example:
        >>> whole = Batch([MicroBatch(torch.arange(5), 5)], samples=5, shares=(5,))
        >>> [micro.data.tolist() for micro in in_parts(whole, 2).micro_batches]
        [[0, 1, 2], [3, 4]]
    """
    if parts == 1:
        return batch
    micro_batches = [part for micro in batch.micro_batches for part in _cut(micro, parts)]
    return Batch(micro_batches, batch.samples, batch.shares, batch.last)


def _cut(micro: MicroBatch, parts: int) -> list[MicroBatch]:
    rows = count_rows(micro.data)
    size, rest = divmod(micro.samples, parts)
    stops = [size * index + min(index, rest) for index in range(parts + 1)]
    return [MicroBatch(take_rows(micro.data, *rows_to_read(a, b, rows), rows), b - a) for a, b in pairwise(stops)]


def stand_in(micro: MicroBatch) -> MicroBatch:
    """Returns the least that a micro-batch can be run with: its last samples."""
    rows = count_rows(micro.data)
    return MicroBatch(take_rows(micro.data, *rows_to_read(0, 0, rows), rows), micro.samples)


def explain(error: BaseException, engine: Engine) -> None:
    """Adds to an error of memory what to write."""
    if not is_out_of_memory(error) or not hasattr(engine, "batch"):
        return
    micro = max(micro.samples for micro in engine.batch.micro_batches)
    count = len(engine.batch.micro_batches)
    error.add_note(
        f"Rank {engine.mesh.rank} ran out of memory on micro-batches of {micro} samples. Write accumulate={2 * count}, "
        "or leave accumulate out and write auto='O1', which halves micro-batches until they fit."
    )
