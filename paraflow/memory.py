"""Steps that run out of memory, run again in smaller micro-batches: on all ranks, if one has run out.

A rank that runs out of memory in the middle of a step cannot simply leave it, for the others wait for it in the step's
collectives. It tells them, waits until all have heard, and goes through the rest of the step with a stand-in of one
sample (two where a layer takes statistics). Before the optimizer every rank gives the step up, and all begin it anew
from the original micro-batches, each cut in twice as many parts. A step that fits pays for a copy of the buffers that
steps change (running statistics) and of torch's random state, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from paraflow.buffers import Buffers
from paraflow.data.batch import Batch, MicroBatch, count_rows, map_tensors, take_rows
from paraflow.engine import Engine
from paraflow.errors import ParaflowError
from paraflow.loss import StepOutput
from paraflow.profiler.attempt import is_out_of_memory
from paraflow.step import StepAbandoned, StepResult

if TYPE_CHECKING:
    from paraflow.run import Run
    from paraflow.trainer import Trainer
    from paraflow.watch import Watch


def stepping(trainer: Trainer, watch: Watch, say: Callable[[str], None]) -> Callable[[Batch], StepResult]:
    """Returns what runs a step: the engine, or a guard around it where micro-batches may be halved.

    A step can be begun anew where its only collectives are those of its gradients, as far as can be seen: a forward
    that communicates by itself must have ``accumulate`` said.
    """
    engine = trainer.engine
    if not trainer.chooses_accumulation or not _can_begin_anew(engine):
        return engine.train_step
    return MemoryGuard(engine, trainer.run, watch, say).train_step


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
        self._buffers = Buffers(engine.module)
        self._least = 2 if any(_takes_statistics(layer) for layer in engine.module.modules()) else 1

    def train_step(self, batch: Batch) -> StepResult:
        """Runs one step, in as many attempts as it takes.

        Raises:
            ParaflowError: Not even micro-batches of one sample fit.
        """
        engine = self._engine
        self._buffers.keep()
        generators = _generators(engine)
        engine.run_micro_batch, engine.abandons = self._run_micro_batch, self._given_up
        try:
            while True:
                self._attempt += 1
                try:
                    return engine.train_step(in_parts(batch, self._run.parts, self._least))
                except StepAbandoned:
                    self._halve(batch)
                self._buffers.put_back()
                _set_generators(engine, generators)
        finally:
            engine.run_micro_batch, engine.abandons = self._plain, None

    def _given_up(self) -> bool:
        return self._watch.given_up(self._attempt)

    def _run_micro_batch(self, micro: MicroBatch, batch: Batch) -> StepOutput:
        if self._given_up():
            return self._plain(stand_in(micro, self._least), batch)
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
        return self._plain(stand_in(micro, self._least), batch)

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


def in_parts(batch: Batch, parts: int, least: int = 1) -> Batch:
    """Returns a batch whose micro-batches are each cut in so many, the same number on every rank.

    What a step does to the containers of a batch does not reach the original.

    Args:
        batch: This rank's share.
        parts: Parts of a micro-batch.
        least: Samples that a part is run with where there is nothing left for it.

    Example:
        >>> whole = Batch([MicroBatch(torch.arange(5), 5)], samples=5, shares=(5,))
        >>> [micro.data.tolist() for micro in in_parts(whole, 2).micro_batches]
        [[0, 1, 2], [3, 4]]
    """
    alone = len(batch.shares) == 1
    micro_batches = [
        MicroBatch(map_tensors(lambda tensor: tensor, part.data), part.samples)
        for micro in batch.micro_batches
        for part in _cut(micro, max(1, min(parts, micro.samples)) if alone else parts, least)
    ]
    return Batch(micro_batches, batch.samples, batch.shares, batch.last)


def _cut(micro: MicroBatch, parts: int, least: int) -> list[MicroBatch]:
    rows = count_rows(micro.data)
    size, rest = divmod(micro.samples, parts)
    stops = [size * index + min(index, rest) for index in range(parts + 1)]
    return [
        MicroBatch(take_rows(micro.data, *((a, b) if b > a else (max(rows - least, 0), rows)), rows), b - a)
        for a, b in pairwise(stops)
    ]


def stand_in(micro: MicroBatch, least: int = 1) -> MicroBatch:
    """Returns the least that a micro-batch can be run with: its last samples."""
    rows = count_rows(micro.data)
    return MicroBatch(take_rows(micro.data, max(rows - least, 0), rows, rows), micro.samples)


def _generators(engine: Engine) -> list[torch.Tensor]:
    """The states of torch's generators, of the host and of the device; reading them waits for nothing."""
    device = engine.mesh.device
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _set_generators(engine: Engine, states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, engine.mesh.device)


def _takes_statistics(layer: torch.nn.Module) -> bool:
    return bool(getattr(layer, "track_running_stats", False))


def _can_begin_anew(engine: Engine) -> bool:
    return engine.runs_in_turn and not engine.partition_dims and not _communicates(engine)


def _communicates(engine: Engine) -> bool:
    """Whether the ranks' forwards are known to exchange something."""
    layers = engine.module.modules()
    return engine.mesh.world_size > 1 and any(isinstance(layer, torch.nn.SyncBatchNorm) for layer in layers)


@contextmanager
def explained(trainer: Trainer) -> Iterator[None]:
    """Adds to an error of memory in a step what to write, before anybody is told of it."""
    try:
        yield
    except BaseException as error:
        _explain(error, trainer)
        raise


def _explain(error: BaseException, trainer: Trainer) -> None:
    if not is_out_of_memory(error) or not _in_step(error):
        return
    engine = trainer.engine
    micro = max(micro.samples for micro in engine.batch.micro_batches)
    count = len(engine.batch.micro_batches)
    halved = ", or leave accumulate out and write auto='O1', which halves micro-batches until they fit"
    may_halve = not trainer.chooses_accumulation and _can_begin_anew(engine)
    error.add_note(
        f"Rank {engine.mesh.rank} ran out of memory on micro-batches of {micro} samples. Write "
        f"accumulate={2 * count}{halved if may_halve else ''}."
    )


def _in_step(error: BaseException) -> bool:
    """Whether an error was raised while a micro-batch of a step was run."""
    return _passed_through(error, "_forward_backward")


def _in_backward(error: BaseException) -> bool:
    return _passed_through(error, "_engine_run_backward")


def _passed_through(error: BaseException, function: str) -> bool:
    frames = error.__traceback__
    while frames is not None:
        if frames.tb_frame.f_code.co_name == function:
            return True
        frames = frames.tb_next
    return False
