"""Loggers: callbacks that write a run's numbers somewhere. What a logger needs is imported when it is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
