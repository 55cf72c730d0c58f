"""A run that is interrupted in the middle of an epoch, and carried on to the weights of a run that never stopped.

python examples/interrupted.py                        one process
paraflow launch -n 2 examples/interrupted.py          two

The interruption is a real SIGTERM, which one rank sends itself, as a scheduler would. All ranks stop after the same
step and save; the second part takes up what was saved with resume="auto".
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits

import paraflow as pf

FOLDER = Path("runs/interrupted")


class Terminate(pf.Callback):
    """Sends this rank's process a SIGTERM at a step."""

    every = 60

    def on_step_end(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
        if pf.rank() == pf.world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def train(folder: Path, *callbacks: pf.Callback) -> torch.nn.Module:
    images, labels = load_digits(return_X_y=True)
    pf.seed(0)
    layers = [torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 10)]
    model = pf.configure(torch.nn.Sequential(*layers), optimizer="adamw", schedule="cosine", loss="cross_entropy")
    trainer = pf.Trainer(max_epochs=4, callbacks=[pf.callbacks.Checkpoint(folder), *callbacks])
    trainer.fit(model, (images / 16, labels), batch_size=64, resume="auto")
    return model


def main() -> None:
    if pf.is_main():
        shutil.rmtree(FOLDER, ignore_errors=True)
    whole = train(FOLDER / "whole")
    try:
        train(FOLDER / "parts", Terminate())
    except SystemExit as end:
        print(f"rank {pf.rank()}: interrupted, would exit with {end.code}", flush=True)
    parts = train(FOLDER / "parts")
    for (name, mine), theirs in zip(parts.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    if pf.is_main():
        print("the same weights, bit for bit")


if __name__ == "__main__":
    main()
