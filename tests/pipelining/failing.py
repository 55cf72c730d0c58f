"""A pipeline of two ranks of which one fails: run by the launcher, with the watch in place."""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor

from paraflow.mesh import Mesh
from paraflow.pipelining.executor import Executor
from paraflow.pipelining.orders import Schedule
from paraflow.plan import Plan
from paraflow.watch import Watch
from tests.pipelining.test_executor import HandMade, Net, batch_of, traffic


class Broken(HandMade):
    def forward(self, stage: int, index: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if stage == 1 and index == 2:
            raise ValueError("the broken stage")
        return super().forward(stage, index, received)


def main() -> None:
    mesh = Mesh(Plan(pp=2), torch.device("cpu"))
    batch = batch_of(4)
    try:
        with Watch(mesh, life=lambda: 0, stall_seconds=None):
            Executor(mesh, Schedule("1f1b", 2)).run(Broken(Net(), batch, 2), [traffic(ids, 2) for ids in batch])
    except ValueError:
        if "linger" not in sys.argv:
            raise
        time.sleep(300)  # the process stays, as a notebook's does


if __name__ == "__main__":
    main()
