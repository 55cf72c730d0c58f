"""Loggers: callbacks that write a run's numbers somewhere. What a logger needs is imported when it is used."""

from paraflow.loggers.base import Logger
from paraflow.loggers.csv import CSVLogger
from paraflow.loggers.jsonlines import JSONLinesLogger
from paraflow.loggers.mlflow import MLflowLogger
from paraflow.loggers.tensorboard import TensorBoardLogger
from paraflow.loggers.wandb import WandbLogger

__all__ = ["CSVLogger", "JSONLinesLogger", "Logger", "MLflowLogger", "TensorBoardLogger", "WandbLogger"]
