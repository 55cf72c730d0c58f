"""Two ranks on gloo: Paraflow against a hand-written DistributedDataParallel loop, in the same pair of processes."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from workload import BATCH_SIZE, LEARNING_RATE, Loop, Size, Turns, make_data, make_model, make_optimizer


def hand_written_ddp(size: Size) -> Loop:
    """The loop a careful person writes: each rank takes its half of every batch, and no step waits for a number."""
    replica, (inputs, targets) = DistributedDataParallel(make_model(), gradient_as_bucket_view=True), make_data(size)
    optimizer = make_optimizer(replica)
    share = BATCH_SIZE // dist.get_world_size()
    start = dist.get_rank() * share
    generator = torch.Generator().manual_seed(1)  # the same order on every rank

    def epoch() -> float:
        total = torch.zeros(())
        for batch in torch.randperm(len(inputs), generator=generator).split(BATCH_SIZE):  # type: ignore[no-untyped-call]
            rows = batch[start : start + share]
            optimizer.zero_grad()
            loss = functional.cross_entropy(replica(inputs[rows]), targets[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        return total.item() / (size.steps * dist.get_world_size())

    return epoch


def paraflow_rank(size: Size, itself: bool) -> list[tuple[float, float]]:
    """One rank's run; `itself` puts a second hand-written loop in the place of Paraflow.

    Returns:
        Microseconds a step of the hand-written loop and of the contender, turn by turn.
    """
    import paraflow as pf

    torch.set_num_threads(1)
    turns = Turns(size, lambda: hand_written_ddp(size))

    class EpochBegins(pf.Callback):
        def on_epoch_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
            turns.epoch_begins()

    if itself:
        dist.init_process_group("gloo")
        epoch = hand_written_ddp(size)
        for _ in turns.epochs():
            epoch()
        dist.destroy_process_group()
        return turns.microseconds()
    model = pf.configure(make_model(), optimizer="adamw", lr=LEARNING_RATE, loss="cross_entropy")
    trainer = pf.Trainer(max_epochs=size.trained_epochs, progress=False, device="cpu", callbacks=[EpochBegins()])
    trainer.fit(model, make_data(size), batch_size=BATCH_SIZE)
    return turns.microseconds()


def measure_two_processes(size: Size, itself: bool = False) -> list[tuple[float, float]]:
    """Runs two ranks, and returns what rank 0 measured; the ranks wait for each other in every step."""
    from paraflow import spawn

    os.environ["OMP_NUM_THREADS"] = "1"
    pairs: list[tuple[float, float]] = spawn(paraflow_rank, 2, (size, itself))[0]
    return pairs
