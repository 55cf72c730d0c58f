"""The contenders: each trains the same model on the same data, set up for speed as a careful user would.

Logging, checkpoints, progress and metrics are off. Each is run in a process of its own, so that no library's imports,
threads or settings reach another's. A contender imports its library itself, and one that is not installed is left out.
"""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset
from workload import (
    BATCH_SIZE,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Size,
    Turns,
    hand_written,
    make_data,
    make_model,
    make_optimizer,
)


def make_loader(turns: Turns) -> DataLoader[Any]:
    """The DataLoader that is given to those who need one: shuffled, in this process."""
    return DataLoader(TensorDataset(*make_data(turns.size)), batch_size=BATCH_SIZE, shuffle=True)


def hand_written_again(turns: Turns) -> None:
    """The hand-written loop against itself: what this benchmark can tell apart."""
    epoch = hand_written(turns.size)
    for _ in turns.epochs():
        epoch()


def hand_written_fused(turns: Turns) -> None:
    """The hand-written loop with AdamW(fused=True)."""
    epoch = hand_written(turns.size, fused=True)
    for _ in turns.epochs():
        epoch()


def hand_written_loader(turns: Turns) -> None:
    """The hand-written loop over DataLoader(TensorDataset), as most of the trainers below are given."""
    model, loader = make_model(), make_loader(turns)
    optimizer = make_optimizer(model)
    for _ in turns.epochs():
        for inputs, targets in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def _fit_paraflow(turns: Turns, data: Any, batch_size: int | None = None, **options: Any) -> None:
    import paraflow as pf

    class EpochBegins(pf.Callback):
        def on_epoch_begin(self, trainer: pf.Trainer, logs: dict[str, Any]) -> None:
            turns.epoch_begins()

    model = pf.configure(make_model(), optimizer="adamw", lr=LEARNING_RATE, loss="cross_entropy")
    trainer = pf.Trainer(
        max_epochs=turns.size.trained_epochs, progress=False, device="cpu", callbacks=[EpochBegins()], **options
    )
    trainer.fit(model, data, batch_size=batch_size)


def paraflow_arrays(turns: Turns) -> None:
    """pf.Trainer(progress=False).fit(model, (x, y)); torch's default AdamW; keeps the loss of each epoch."""
    _fit_paraflow(turns, make_data(turns.size), BATCH_SIZE)


def paraflow_loader(turns: Turns) -> None:
    """The same, given the DataLoader; Paraflow reads a plain loader of a TensorDataset by rows, as it does arrays."""
    _fit_paraflow(turns, make_loader(turns))


def paraflow_o1(turns: Turns) -> None:
    """The same with auto="O1", which chooses the fused AdamW."""
    _fit_paraflow(turns, make_data(turns.size), BATCH_SIZE, auto="O1")


def lightning_trainer(turns: Turns) -> None:
    """lightning.Trainer(barebones=True), its own mode for measuring overhead; automatic optimization."""
    from lightning import LightningModule, Trainer

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def on_train_epoch_start(self) -> None:
            turns.epoch_begins()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            inputs, targets = batch
            return functional.cross_entropy(self.model(inputs), targets)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self.model)

    trainer = Trainer(max_epochs=turns.size.trained_epochs, barebones=True, accelerator="cpu", devices=1)
    trainer.fit(Module(), make_loader(turns))


def lightning_fabric(turns: Turns) -> None:
    """lightning.Fabric: a hand-written loop over what its setup returns, with fabric.backward."""
    from lightning import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model = make_model()
    module, optimizer = fabric.setup(model, make_optimizer(model))
    loader = fabric.setup_dataloaders(make_loader(turns))
    for _ in turns.epochs():
        for inputs, targets in loader:
            optimizer.zero_grad()
            fabric.backward(functional.cross_entropy(module(inputs), targets))
            optimizer.step()


def accelerate_loop(turns: Turns) -> None:
    """accelerate.Accelerator(cpu=True): a hand-written loop over what prepare returns, with its backward."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = make_model()
    module, optimizer, loader = accelerator.prepare(model, make_optimizer(model), make_loader(turns))
    for _ in turns.epochs():
        for inputs, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(functional.cross_entropy(module(inputs), targets))
            optimizer.step()


class _Rows(Dataset[dict[str, torch.Tensor]]):
    """Samples as the mappings that transformers' Trainer takes."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.inputs[row], "labels": self.targets[row]}


class _WithLoss(nn.Module):
    """A model as transformers' Trainer takes it: it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.model(inputs)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def transformers_trainer(turns: Turns) -> None:
    """transformers.Trainer: torch's AdamW, constant rate, no clipping, no filter of NaN losses; torch's collation."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class EpochBegins(TrainerCallback):
        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            turns.epoch_begins()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=turns.size.trained_epochs,
            per_device_train_batch_size=BATCH_SIZE,
            learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            optim="adamw_torch",
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_nan_inf_filter=False,
            dataloader_pin_memory=False,
            remove_unused_columns=False,
            use_cpu=True,
        )
        data = _Rows(*make_data(turns.size))
        collate = torch.utils.data.default_collate
        trainer = Trainer(_WithLoss(), arguments, collate, data, callbacks=[EpochBegins()])
        trainer.train()


def keras_fit(turns: Turns) -> None:
    """keras.Model.fit on torch (KERAS_BACKEND=torch), from arrays in memory; verbose=0, no metrics, not compiled."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    model = keras.Sequential(
        [
            keras.layers.Input((32,)),
            keras.layers.Dense(64, "relu"),
            keras.layers.Dense(64, "relu"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.AdamW(LEARNING_RATE, weight_decay=WEIGHT_DECAY, epsilon=1e-8)
    model.compile(optimizer, loss, jit_compile=False)
    inputs, targets = (part.numpy() for part in make_data(turns.size))
    begins = keras.callbacks.LambdaCallback(on_epoch_begin=turns.epoch_begins)
    epochs = turns.size.trained_epochs
    model.fit(inputs, targets, BATCH_SIZE, epochs, verbose=0, shuffle=True, callbacks=[begins])


def skorch_fit(turns: Turns) -> None:
    """skorch.NeuralNet: callbacks="disable", train_split=None, verbose=0; it reads the loss of every step by itself."""
    from skorch import NeuralNet

    class Loader(DataLoader[Any]):
        def __iter__(self) -> Any:
            turns.epoch_begins()
            return super().__iter__()

    net = NeuralNet(
        make_model,
        nn.CrossEntropyLoss,
        optimizer=torch.optim.AdamW,
        optimizer__weight_decay=WEIGHT_DECAY,
        lr=LEARNING_RATE,
        max_epochs=turns.size.trained_epochs,
        batch_size=BATCH_SIZE,
        iterator_train=Loader,
        iterator_train__shuffle=True,
        train_split=None,
        callbacks="disable",
        verbose=0,
    )
    net.fit(*make_data(turns.size))


def ignite_engine(turns: Turns) -> None:
    """ignite.engine.Engine around a hand-written step that returns nothing."""
    from ignite.engine import Engine, Events

    model = make_model()
    optimizer = make_optimizer(model)

    def step(engine: Any, batch: Any) -> None:
        inputs, targets = batch
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    engine = Engine(step)
    engine.add_event_handler(Events.EPOCH_STARTED, turns.epoch_begins)
    engine.run(make_loader(turns), max_epochs=turns.size.trained_epochs)


@dataclass(frozen=True)
class Contender:
    """Who is measured.

    Attributes:
        name: What it is called on the command line.
        title: What it is called in the table.
        train: Trains, calling `Turns.epoch_begins` at the beginning of each epoch.
        package: What has to be installed for it.
        bar: The most its step may cost, as a multiple of the hand-written loop's.
        fused_reference: Whether the hand-written loop it takes turns with has the fused AdamW.
    """

    name: str
    title: str
    train: Callable[[Turns], None]
    package: str = "torch"
    bar: float | None = None
    fused_reference: bool = False


CONTENDERS = (
    Contender("hand", "hand-written loop, against itself", hand_written_again),
    Contender("hand-fused", "hand-written, fused AdamW", hand_written_fused),
    Contender("hand-loader", "hand-written, over a DataLoader", hand_written_loader),
    Contender("paraflow", "Paraflow", paraflow_arrays, bar=1.03),
    Contender("paraflow-loader", "Paraflow, given a DataLoader", paraflow_loader),
    Contender("paraflow-o1", 'Paraflow, auto="O1"', paraflow_o1, bar=0.85),
    Contender("paraflow-o1-fused", 'Paraflow, auto="O1" ÷ hand-written fused', paraflow_o1, fused_reference=True),
    Contender("accelerate", "Accelerate", accelerate_loop, "accelerate"),
    Contender("fabric", "Lightning Fabric", lightning_fabric, "lightning"),
    Contender("ignite", "Ignite", ignite_engine, "ignite"),
    Contender("skorch", "skorch", skorch_fit, "skorch"),
    Contender("lightning", "Lightning Trainer", lightning_trainer, "lightning"),
    Contender("transformers", "transformers Trainer", transformers_trainer, "transformers"),
    Contender("keras", "Keras on torch", keras_fit, "keras"),
)


def measure(name: str, size: Size) -> list[tuple[float, float]]:
    """Runs a contender in this process.

    Returns:
        Microseconds a step of the hand-written loop and of the contender, turn by turn.
    """
    contender = next(contender for contender in CONTENDERS if contender.name == name)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    turns = Turns(size, lambda: hand_written(size, contender.fused_reference))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        contender.train(turns)
    return turns.microseconds()
