"""A module that knows nothing of Paraflow, trained as it is; any optimizer, schedule and loss of torch will do.

python examples/plain_module.py
torchrun --nproc-per-node 2 examples/plain_module.py
"""

from __future__ import annotations

import argparse
import os

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paraflow as pf


class Progression(nn.Module):
    """Predicts how diabetes progresses in a year, from ten measurements of a patient (442 real ones)."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(10, 32)
        self.out = nn.Linear(32, 1)

    def forward(self, patients: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.hidden(patients))).squeeze(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", default=bool(os.environ.get("PARAFLOW_QUICK")))
    quick = parser.parse_args().quick

    patients, progression = (torch.tensor(column, dtype=torch.float32) for column in load_diabetes(return_X_y=True))
    target = (progression - progression.mean()) / progression.std()
    train = DataLoader(TensorDataset(patients[:350] * 20, target[:350]), batch_size=32, shuffle=True)
    test = DataLoader(TensorDataset(patients[350:] * 20, target[350:]), batch_size=32)

    pf.seed(0)
    model = Progression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
    pf.configure(
        model,
        optimizer=optimizer,
        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=100, gamma=0.5),
        loss=nn.HuberLoss(),
        metrics={"mae": "mae", "worst": lambda output, target: (output - target).abs().max()},
    )
    trainer = pf.Trainer(max_epochs=3 if quick else 25, clip_norm=1.0)
    trainer.fit(model, train, test)
    result = trainer.evaluate(model, test)
    baseline = (target[350:] - target[:350].mean()).abs().mean()
    if pf.is_main():
        print(f"mean absolute error on held-out patients: {result['mae']:.3f}; of guessing the mean: {baseline:.3f}")


if __name__ == "__main__":
    main()
