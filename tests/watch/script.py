"""A small training that does what its arguments say at a step: run by the launcher in the tests of the watch."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

import paraflow as pf


def net(dropout: float) -> torch.nn.Module:
    pf.seed(3)
    hidden = (torch.nn.Linear(5, 16), torch.nn.ReLU(), torch.nn.Dropout(dropout))
    body = torch.nn.Sequential(*hidden, torch.nn.Linear(16, 3))
    return pf.configure(body, optimizer="adamw", lr=1e-2, loss="cross_entropy")


class Slow(pf.Callback):
    """Says where the run is, and waits."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_step_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        if pf.is_main():
            print(f"at step {trainer.step} of {pf.world_size()} ranks", flush=True)
        time.sleep(self.seconds)


class At(pf.Callback):
    """Does something on one rank when a step begins."""

    def __init__(self, step: int, rank: int, what: str) -> None:
        self.step, self.rank, self.what = step, rank, what

    def on_step_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        if trainer.step == self.step and pf.rank() == self.rank:
            getattr(self, self.what)()

    def term(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def interrupt(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def usr1(self) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)

    def twice(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(100)

    def sleep(self) -> None:
        time.sleep(100)  # the stalled line

    def die(self) -> None:
        if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            os.kill(os.getpid(), signal.SIGKILL)

    def freeze(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def fail(self) -> None:
        raise ValueError("the broken rank")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--at", type=int, default=-1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--what", default="term")
    parser.add_argument("--linger", action="store_true", help="an exception is caught, and the process stays")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--options", type=json.loads, default={})
    said = parser.parse_args()
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(40, 5, generator=generator), torch.randint(0, 3, (40,), generator=generator)
    )
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, num_workers=said.workers)
    model = net(said.dropout)
    callbacks = [pf.callbacks.Checkpoint(said.folder, "2ep"), At(said.at, said.rank, said.what)]
    callbacks += [Slow(said.pause)] if said.pause else []
    trainer = pf.Trainer(max_epochs=4, callbacks=callbacks, **said.options)
    try:
        trainer.fit(model, loader, data, resume="auto")
    except ValueError:
        if not said.linger:
            raise
        time.sleep(100)
    if pf.is_main():
        torch.save(model.state_dict(), said.folder / "final.pt")


if __name__ == "__main__":
    main()
