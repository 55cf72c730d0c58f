"""What the callbacks show and do, on scikit-learn's handwritten digits.

python examples/callbacks.py                        one process
paraflow launch -n 2 examples/callbacks.py          two, the same training

Before training: a table of the model, and a learning rate from a range test (runs/callbacks/learning-rate.png). While
it trains: an average of the weights, on which it validates; throughput and memory in the log; a stop when the
validation gets no better; a guard against steps that are not finite. Afterwards: the log, the curves, and the averaged
weights of the best checkpoint.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import paraflow as pf

FOLDER = Path("runs/callbacks")


def net() -> torch.nn.Module:
    layers = [torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.Linear(128, 10)]
    return pf.configure(
        torch.nn.Sequential(*layers), optimizer="adamw", lr=1e-3, loss="cross_entropy", metrics=["accuracy"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", default=bool(os.environ.get("PARAFLOW_QUICK")))
    quick = parser.parse_args().quick

    images, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(images / 16, labels, test_size=0.2, random_state=0)

    pf.seed(0)
    model, average = net(), pf.callbacks.EMA(0.99, warmup=True)
    trainer = pf.Trainer(
        max_epochs=3 if quick else 60,
        callbacks=[
            pf.callbacks.ModelSummary(),
            pf.callbacks.LearningRateFinder(1e-5, 1.0, steps=60, folder=FOLDER, apply=True),
            pf.callbacks.NaNGuard(every=20),
            pf.callbacks.Throughput(every=20),
            pf.callbacks.MemoryMonitor(every=20),
            average,
            pf.callbacks.EarlyStopping("val_loss", patience=5),
            pf.callbacks.Checkpoint(FOLDER / "checkpoints", monitor="val_loss", background=True),
        ],
        loggers=[pf.loggers.JSONLinesLogger(FOLDER / "log.jsonl", every=20)],
    )
    history = trainer.fit(model, (train_x, train_y), (test_x, test_y), batch_size=64)

    best = net()
    pf.callbacks.EMA.load(best, FOLDER / "checkpoints", best=True)
    results = trainer.evaluate(best, (test_x, test_y))
    if pf.is_main():
        history.plot(FOLDER / "curves.png")
        print(f"the average of the best epoch recognises {results['accuracy']:.1%} of {len(test_y)} held-out digits")
        print(f"log, curves and checkpoints are in {FOLDER}")


if __name__ == "__main__":
    main()
