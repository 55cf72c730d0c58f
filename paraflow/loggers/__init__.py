"""Loggers: callbacks that write a run's numbers somewhere."""

from paraflow.loggers.csv import CSVLogger

__all__ = ["CSVLogger"]
