"""Loggers: callbacks that write a run's numbers somewhere. What a logger needs is imported when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paraflow.lazy import lazy_names

if TYPE_CHECKING:
    from paraflow.loggers.base import Logger
    from paraflow.loggers.csv import CSVLogger
    from paraflow.loggers.jsonlines import JSONLinesLogger
    from paraflow.loggers.mlflow import MLflowLogger
    from paraflow.loggers.tensorboard import TensorBoardLogger
    from paraflow.loggers.wandb import WandbLogger

__all__ = ["CSVLogger", "JSONLinesLogger", "Logger", "MLflowLogger", "TensorBoardLogger", "WandbLogger"]

_HOMES = {
    "Logger": "base",
    "CSVLogger": "csv",
    "JSONLinesLogger": "jsonlines",
    "MLflowLogger": "mlflow",
    "TensorBoardLogger": "tensorboard",
    "WandbLogger": "wandb",
}


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
