"""The training that faults.py starts, disturbs and starts again: small, and with all that a resumed run can get wrong.

    python benchmarks/fault_runs.py FOLDER [OPTIONS IN JSON]

Dropout, batch statistics, augmentation with three random generators in the loader's workers, a last batch that is
short, AdamW, a cosine schedule with warm-up, metrics, validation, an average of the weights, and a checkpoint every few
steps. It resumes by itself (``resume="auto"``), and leaves in its folder:

    checkpoints/    what Checkpoint writes, unless the options name another folder
    trace.jsonl     what happened when, a line each, so that a killed run has told all it did
    unpickled.txt   every name that something unpickled from anywhere but the loader's own workers
    result.pt       the state at the end, written by rank 0
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import paraflow as pf

FEATURES, CLASSES = 24, 5


@dataclass(frozen=True)
class Options:
    """What a run is told.

    Attributes:
        width: Of the hidden layers; 1024 makes checkpoints that take most of the time.
        samples: Of an epoch.
        epochs: Of the run.
        workers: Of the loader.
        every: Steps from one checkpoint to the next.
        keep: Checkpoints that stay.
        background: Whether training goes on while one is written.
        on_error: What becomes of the run where one cannot be written.
        checkpoints: The folder of the checkpoints, where it is another one.
        at, rank, what: At which step which rank does what (a method of `Fault`).
        trainer: Further arguments of the Trainer.
    """

    width: int = 48
    samples: int = 390
    epochs: int = 14
    workers: int = 2
    every: int = 4
    keep: int = 2
    background: bool = False
    on_error: str = "raise"
    checkpoints: str = ""
    at: int = -1
    rank: int = 0
    what: str = ""
    trainer: dict[str, Any] | None = None


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points of a few classes, augmented anew each time they are fetched."""

    def __init__(self, count: int, broken: int = -1) -> None:
        generator = torch.Generator().manual_seed(1)
        centres = torch.randn(CLASSES, FEATURES, generator=generator)
        self.targets = torch.randint(0, CLASSES, (count,), generator=generator)
        self.inputs = centres[self.targets] + torch.randn(count, FEATURES, generator=generator)
        self.broken = broken

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == self.broken:
            raise ValueError("the broken sample")
        inputs = self.inputs[index] + 0.1 * torch.randn(FEATURES)
        inputs = inputs.flip(0) if random.random() < 0.1 else inputs
        return inputs * float(np.random.uniform(0.9, 1.1)), self.targets[index]


class Trace(pf.Callback):
    """Writes down what happens, past any buffer. It comes after Checkpoint, so it knows what that has finished."""

    def __init__(self, folder: Path, options: Options) -> None:
        self._options = options
        self._file = os.open(folder / "trace.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, what: str, step: int = 0) -> None:
        """Adds a line."""
        line = {"time": time.time(), "rank": pf.rank(), "pid": os.getpid(), "what": what, "step": step}
        os.write(self._file, (json.dumps(line) + "\n").encode())

    def on_train_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.note("train", trainer.step)

    def on_checkpoint(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        if not trainer.is_main:
            return
        self.note("step", trainer.step)
        if trainer.step % self._options.every == 0:
            # One in the background is sure to be there when the next begins.
            done = trainer.step - self._options.every if self._options.background else trainer.step
            self.note("saved", done)

    def on_train_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        self.note("end", trainer.step)


class Fault(pf.Callback):
    """Does something on one rank when a step begins."""

    def __init__(self, options: Options, trace: Trace) -> None:
        self._options, self._trace = options, trace

    def on_step_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        said = self._options
        if trainer.step == said.at and pf.rank() == said.rank and hasattr(self, said.what):
            self._trace.note("fault", trainer.step)
            getattr(self, said.what)()

    def fail(self) -> None:
        raise ValueError("the broken rank")

    def sleep(self) -> None:
        time.sleep(1000)  # the stalled line

    def freeze(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def note_unpickling(folder: Path) -> None:
    """Has every name that is unpickled written down, but for what the loader's workers send."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "pickle.find_class":
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if "multiprocessing" in frame.f_code.co_filename:
                return
            frame = frame.f_back
        with open(folder / "unpickled.txt", "a") as file:
            file.write(f"{arguments[0]}.{arguments[1]}\n")

    sys.addaudithook(hook)


def make_model(width: int) -> nn.Module:
    """Returns the model, with its recipe."""
    pf.seed(3)
    body = nn.Sequential(
        nn.Linear(FEATURES, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(width, CLASSES),
    )
    return pf.configure(
        body,
        optimizer="adamw",
        lr=3e-3,
        schedule="cosine",
        warmup=10,
        loss="cross_entropy",
        metrics=["accuracy"],
    )


def main() -> None:
    """Trains, or goes on training."""
    folder = Path(sys.argv[1])
    options = Options(**json.loads(sys.argv[2])) if len(sys.argv) > 2 else Options()
    trace = Trace(folder, options)
    note_unpickling(folder)
    broken = options.at if options.what == "sample" else -1
    loader = DataLoader(Samples(options.samples, broken), batch_size=16, shuffle=True, num_workers=options.workers)
    checkpoint = pf.callbacks.Checkpoint(
        options.checkpoints or folder / "checkpoints",
        options.every,
        monitor="val_loss",
        keep=options.keep,
        background=options.background,
        on_error=options.on_error,  # type: ignore[arg-type]
    )
    ema = pf.callbacks.EMA(0.99, warmup=True)
    callbacks = [ema, checkpoint, trace, Fault(options, trace)]
    trainer = pf.Trainer(max_epochs=options.epochs, callbacks=callbacks, **options.trainer or {})
    model = make_model(options.width)
    trace.note("fit")
    trainer.fit(model, loader, Samples(90), resume="auto")
    state = trainer.state_dict()
    if trainer.is_main:
        kept = {name: state[name] for name in ("model", "optimizer", "schedule", "counters", "run", "history")}
        torch.save({**kept, "ema": ema.state_dict()}, folder / "result.pt")


if __name__ == "__main__":
    main()
