"""Handwritten digits: scikit-learn's 1,797 real scans, 8 × 8 pixels.

python examples/digits.py                        one process
paraflow launch -n 2 examples/digits.py          two, the same training
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import paraflow as pf

FOLDER = Path("runs/digits")


class Digits(pf.Model):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3, padding=1),
            nn.GELU(),
            nn.Conv2d(32, 64, kernel_size=3, padding=1, stride=2),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 128),
            nn.GELU(),
            nn.Dropout(0.2),
            nn.Linear(128, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the logits [samples, 10] of images [samples, 1, 8, 8]."""
        return self.body(images)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", default=bool(os.environ.get("PARAFLOW_QUICK")))
    quick = parser.parse_args().quick

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 1, 8, 8) / 16
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)

    pf.seed(0)
    model = Digits().configure(
        optimizer="adamw", lr=2e-3, schedule="cosine", warmup=0.1, loss="cross_entropy", metrics=["accuracy"]
    )
    trainer = pf.Trainer(
        max_epochs=3 if quick else 12,
        auto="O1",
        callbacks=[pf.callbacks.Checkpoint(FOLDER / "checkpoints", monitor="val_loss")],
        loggers=[pf.loggers.CSVLogger(FOLDER / "log.csv", every=10)],
    )
    history = trainer.fit(model, (train_x, train_y), (test_x, test_y), batch_size=64)
    result = trainer.evaluate(model, (test_x, test_y))

    if pf.is_main():
        report(history, result)


def report(history: pf.History, result: dict[str, float]) -> None:
    import rich

    curve = history.plot(FOLDER / "curve.png")
    rich.print(history.table(title="history"))
    print(f"held-out digits recognised: {result['accuracy']:.1%}\n")
    print(f"checkpoint  {pf.checkpoint.find(FOLDER / 'checkpoints')}")
    print(f"log         {FOLDER / 'log.csv'}")
    print(f"loss curve  {curve}")


if __name__ == "__main__":
    main()
